"""Real Horovod as a backend. Only this folder imports `horovod`.

This file distinguishes the installed Horovod from `dualdist.compat`, which can have the same name. No other one does.

Horovod imports itself by absolute names, so it cannot be imported under another name. Instead, while dualdist.compat
is installed, Horovod's modules are kept here, and they are in `sys.modules` only inside `real_horovod()`. The backend
imports all that it needs there. None of the Horovod functions that it calls imports Horovod later, except for
horovodrun's messages about changed hosts, which are pickled inside it, too (`Notifications` in backend.py), and
horovod.torch.functions.broadcast_optimizer_state, which it does not call.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import sys
import threading
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

from ..core.types import World

CHILDREN_FOLDER = str(Path(__file__).parents[1] / "compat" / "children")
"""A folder for the PYTHONPATH of child processes, in which `horovod` is dualdist.compat."""

_lock = threading.RLock()
_replacement: MetaPathFinder | None = None
_kept: dict[str, ModuleType] = {}
"""Horovod's own modules, while the replacement has their names."""
_inside = False


def replace_horovod(finder: MetaPathFinder) -> None:
    """Let `finder` load `horovod` from now on, except inside `real_horovod()`."""
    global _replacement
    with _lock:
        _kept.update(_take_modules())
        _replacement = finder
        sys.meta_path.insert(0, finder)


@contextlib.contextmanager
def real_horovod() -> Iterator[None]:
    """Make `import horovod` load the installed Horovod inside the block."""
    global _inside
    with _lock:
        path = [entry for entry in sys.path if entry != CHILDREN_FOLDER]
        if _inside or (_replacement is None and path == sys.path):
            yield
            return
        replaced, path_before, finders_before = _take_modules(), list(sys.path), list(sys.meta_path)
        sys.modules.update(_kept)
        sys.path[:] = path
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _replacement]
        _inside = True
        try:
            yield
        finally:
            _inside = False
            _kept.update(_take_modules())
            sys.modules.update(replaced)
            sys.path[:], sys.meta_path[:] = path_before, finders_before


def is_installed() -> bool:
    """Return whether Horovod can be imported."""
    with real_horovod():
        return importlib.util.find_spec("horovod") is not None


def is_imported() -> bool:
    """Return whether this process has imported horovod.torch."""
    with real_horovod():
        return "horovod.torch" in sys.modules


def _take_modules() -> dict[str, ModuleType]:
    """Remove Horovod's names from sys.modules, and return the modules that they named."""
    names = [name for name in sys.modules if name.partition(".")[0] == "horovod"]
    return {name: sys.modules.pop(name) for name in names}


def horovods_version() -> str:
    """Return the version of the installed Horovod, as far as it is known: it may be used without an installation."""
    try:
        return importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"


# The variables with which Horovod starts, for a process of another launcher.

OVER_GLOO = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
"""As horovodrun sets them (horovod/runner/gloo_run.py:205). Without the second, a Horovod built with MPI starts MPI."""


def horovod_variables(
    world: World, rendezvous: tuple[str, int] | None = None, host: str = "", interface: str | None = None
) -> dict[str, str]:
    """Return horovodrun's variables for one process.

    rendezvous: the address of the HTTP server at which Horovod's Gloo controllers meet
    (horovod/common/gloo/gloo_context.cc:134-170); None if there is none. host: a name of the process's node. interface:
    the network interface of Horovod's Gloo; None if the process's host finds it.
    """
    found = {f"HOROVOD_{name.upper()}": getattr(world, name) for name in World.__dataclass_fields__}
    if rendezvous is not None:
        address, port = rendezvous
        found |= {**OVER_GLOO, "HOROVOD_HOSTNAME": host}
        found |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": address, "HOROVOD_GLOO_RENDEZVOUS_PORT": port}
        found |= {} if interface is None else {"HOROVOD_GLOO_IFACE": interface}
    return {name: str(value) for name, value in found.items()}
