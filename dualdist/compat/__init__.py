"""Run an unmodified Horovod script or module on dualdist, under any launcher.

    python -m dualdist.compat train.py ARGS
    torchrun --nproc-per-node 4 -m dualdist.compat train.py ARGS
    mpirun -np 4 python -m dualdist.compat -m package.train ARGS

Then `import horovod.torch` imports dualdist, whether Horovod is installed or not. The backend is chosen as always
(`DUALDIST_BACKEND`). If a program cannot be started this way, call `dualdist.compat.install()` before it imports
Horovod. Processes that the script starts (spawned workers, other scripts) inherit this.
"""

from __future__ import annotations

import os
import sys

from ..backends.horovod.installed import CHILDREN_FOLDER, replace_horovod
from ..errors import NotInitializedError
from .environment import export_launch
from .finder import HorovodFinder

__all__ = ("install",)

_installed = False


def install() -> None:
    """Make `import horovod.torch` import dualdist from now on, and set HOROVOD_RANK and similar variables.

    Modules that have already imported Horovod keep it. A second call does nothing.
    """
    global _installed
    if _installed:
        return
    _installed = True
    replace_horovod(HorovodFinder())
    NotInitializedError.before_init = "Horovod has not been initialized; use hvd.init()."
    export_launch(os.environ)
    inherited = os.environ.get("PYTHONPATH", "")
    if CHILDREN_FOLDER not in sys.path:
        # A child that multiprocessing spawns gets this list instead of PYTHONPATH.
        sys.path.insert(1, CHILDREN_FOLDER)
    if CHILDREN_FOLDER not in inherited.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [CHILDREN_FOLDER, inherited]))
