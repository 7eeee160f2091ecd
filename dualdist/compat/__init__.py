"""Run an unmodified Horovod script or module on dualdist, under any launcher.

    python -m dualdist.compat train.py ARGS
    torchrun --nproc-per-node 4 -m dualdist.compat train.py ARGS
    mpirun -np 4 python -m dualdist.compat -m package.train ARGS

Then `import horovod.torch` imports dualdist, whether Horovod is installed or not. The backend is chosen as always
(`DUALDIST_BACKEND`). If a program cannot be started this way, call `dualdist.compat.install()` before it imports
Horovod. Processes that the script starts (spawned workers, other scripts) inherit this.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import socket
import sys
from collections.abc import MutableMapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import NoReturn

from ..copies import add_copies
from ..core.launch import detect, is_one_host
from ..errors import ConfigurationError, NotInitializedError
from ..horovod import CHILDREN_FOLDER, OVER_GLOO, replace_horovod

__all__ = ("MODULES", "HorovodFinder", "export_launch", "install")

__version__ = "0.28.1"
"""The release of Horovod whose API dualdist has."""


# HOROVOD_RANK and similar variables, which horovodrun sets and scripts read, set under every launcher.
#
# They are recorded as copies. Otherwise launch detection would find horovodrun, and Horovod would use them.


def export_launch(env: MutableMapping[str, str]) -> None:
    """Set what the launcher provides, before `init()`. common.py sets the other numbers after it."""
    with contextlib.suppress(ConfigurationError):  # init() raises it again
        launch = detect(env)
        fixed = {"HOROVOD_HOSTNAME": socket.gethostname()} | ({} if launch.starts_mpi else OVER_GLOO)
        add_copies({name: value for name, value in fixed.items() if not env.get(name)}, env)
        numbers = {name: getattr(launch, name) for name in ("rank", "size", "local_rank", "local_size")}
        if is_one_host(launch):
            numbers |= {"local_rank": launch.rank, "local_size": launch.size, "cross_rank": 0, "cross_size": 1}
        known = {f"HOROVOD_{name.upper()}": str(number) for name, number in numbers.items() if number is not None}
        add_copies(known, env)


# The import hook: modules with Horovod's names, which contain dualdist's functions of the same names.

_COMMON, _TORCH, _ELASTIC = "dualdist.compat.common", "dualdist.compat.torch", "dualdist.compat.elastic"
_API = ("dualdist", f"{_COMMON}:init")
_PROCESS_SETS = tuple(
    f"dualdist:{name}" for name in ("ProcessSet", "add_process_set", "global_process_set", "remove_process_set")
)

MODULES: dict[str, tuple[str, ...]] = {
    "horovod": ("dualdist:run", "dualdist.compat:__version__"),
    "horovod.common": (),
    "horovod.common.basics": (_COMMON,),
    "horovod.common.elastic": ("dualdist.elastic", _ELASTIC, "dualdist:HorovodInternalError"),
    "horovod.common.exceptions": (_COMMON, "dualdist.errors"),
    "horovod.common.process_sets": _PROCESS_SETS,
    "horovod.common.util": (_COMMON, f"{_COMMON}:_cache"),
    "horovod.data": ("dualdist.compat.data",),
    "horovod.data.data_loader_base": ("dualdist.compat.data",),
    "horovod.runner": ("dualdist:run",),
    "horovod.runner.elastic": (),
    "horovod.runner.elastic.worker": (_ELASTIC,),
    "horovod.torch": (*_API, _TORCH, f"{_COMMON}:check_extension"),
    "horovod.torch.compression": (
        "dualdist:Compression",
        "dualdist.core.collectives.reduction:Compressor",
        f"{_TORCH}:FP16Compressor",
        f"{_TORCH}:NoneCompressor",
    ),
    "horovod.torch.elastic": ("dualdist.elastic", _ELASTIC, f"{_COMMON}:init", "dualdist:shutdown"),
    "horovod.torch.elastic.sampler": ("dualdist.elastic", "dualdist:rank", "dualdist:size"),
    "horovod.torch.elastic.state": (
        *_API,
        "dualdist.elastic",
        _ELASTIC,
        f"{_ELASTIC}:_get_handler",
        f"{_ELASTIC}:_get_handlers",
        f"{_ELASTIC}:_union",
    ),
    "horovod.torch.functions": _API,
    "horovod.torch.mpi_ops": (*_API, _COMMON, f"{_COMMON}:_basics", _TORCH),
    "horovod.torch.optimizer": (*_API, _TORCH, f"{_COMMON}:split_list"),
    "horovod.torch.sync_batch_norm": (*_API, _TORCH),
}
"""Horovod's module -> the modules of dualdist with its names, or MODULE:NAME for one name. The later of two wins.

Without `__all__`, the public names that a module itself defines are its names. A function that wraps one of dualdist
has that one's module, so it must be named.
"""

_INSTEAD = {
    "horovod.spark": "Use dualdist.run, or Spark's TorchDistributor with a function that calls hvd.init().",
    "horovod.ray": "Use Ray Train's TorchTrainer with a function that calls hvd.init().",
    "horovod.runner": "Use horovod.run, or the command `dualdist run`.",
}
"""Package -> what to use for those of its modules that do not exist here."""


class HorovodFinder(MetaPathFinder, Loader):
    """Finds and loads dualdist's modules under Horovod's names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "horovod":
            return None
        if fullname not in MODULES:
            remedy = next((f" {text}" for package, text in _INSTEAD.items() if fullname.startswith(package)), "")
            raise ModuleNotFoundError(
                f"{fullname} is not available: dualdist.compat replaces only horovod.torch.{remedy} "
                "Start without dualdist.compat to import the installed Horovod.",
                name=fullname,
            )
        is_package = any(other.startswith(f"{fullname}.") for other in MODULES)
        return spec_from_loader(fullname, self, origin="dualdist.compat", is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = __file__
        for entry in MODULES[module.__name__]:
            path, _, only = entry.partition(":")
            source = importlib.import_module(path)
            own = [name for name, value in vars(source).items() if getattr(value, "__module__", path) == path]
            public = [name for name in own if not name.startswith("_")]
            for name in [only] if only else getattr(source, "__all__", public):
                if not isinstance(getattr(source, name), ModuleType):
                    setattr(module, name, getattr(source, name))
        module.__getattr__ = functools.partial(_refuse, module.__name__)  # type: ignore[method-assign]
        for name in MODULES:
            if name.rpartition(".")[0] == module.__name__:
                importlib.import_module(name)


def _refuse(module: str, name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    public = "horovod.torch" if module.startswith("horovod.torch.") else module
    raise AttributeError(
        f"{module} has no {name!r} under dualdist.compat, which has the public names of Horovod 0.28.1 and the private "
        f"ones that scripts use. Use a public function of {public}, or start without dualdist.compat."
    )


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
