"""The installed Horovod, also while `dualdist.compat` answers to its name: the one place that tells the two apart.

Horovod imports itself by absolute names, so it cannot live under another one. Instead, its modules are kept here and
are in `sys.modules` only inside `real_horovod()`; outside, the name belongs to whom it was lent. The backend imports
all it needs inside; none of Horovod's functions that it calls imports Horovod later (only
horovod.torch.functions.broadcast_optimizer_state does).
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

__all__ = ("STAND_IN_FOLDER", "is_imported", "is_installed", "lend_name", "real_horovod")

STAND_IN_FOLDER = str(Path(__file__).parents[2] / "compat" / "children")
"""A folder for PYTHONPATH whose `horovod` is dualdist.compat, for the child processes of a script."""

_lock = threading.RLock()
_borrower: MetaPathFinder | None = None
_kept: dict[str, ModuleType] = {}
"""Horovod's own modules, while the borrower has their names."""
_inside = False


def lend_name(finder: MetaPathFinder) -> None:
    """From now on, `finder` answers to `import horovod` outside `real_horovod()`."""
    global _borrower
    with _lock:
        _kept.update(_take_modules())
        _borrower = finder
        sys.meta_path.insert(0, finder)


@contextlib.contextmanager
def real_horovod() -> Iterator[None]:
    """Make `import horovod` mean the installed Horovod."""
    global _inside
    with _lock:
        path = [entry for entry in sys.path if entry != STAND_IN_FOLDER]
        if _inside or (_borrower is None and path == sys.path):
            yield
            return
        lent, path_before, finders_before = _take_modules(), list(sys.path), list(sys.meta_path)
        sys.modules.update(_kept)
        sys.path[:] = path
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _borrower]
        _inside = True
        try:
            yield
        finally:
            _inside = False
            _kept.update(_take_modules())
            sys.modules.update(lent)
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
    """Remove Horovod's names from sys.modules and return what they meant."""
    names = [name for name in sys.modules if name.partition(".")[0] == "horovod"]
    return {name: sys.modules.pop(name) for name in names}
