"""The layer that stands alone: it imports nothing of the other folders, which all stand on it, and names none of them.

What they add to it, `dualdist/__init__.py` registers: a module, or a function or class in one, for each point. Its
module is imported when the core first needs it. If that folder or file was taken off, the core does without it, or
raises an ImportError that names it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from typing import Any

_added: dict[str, str] = {}
"""Point -> "module" or "module:name"."""


def register(points: Mapping[str, str]) -> None:
    """Let "module", or "module:name", be what the core uses at each point."""
    _added.update(points)


@functools.cache
def needed(point: str) -> Any:
    """Return what was registered at `point`. Raises ImportError if it is not there."""
    path, _, name = _added[point].partition(":")
    module = importlib.import_module(path)
    return getattr(module, name) if name else module


@functools.cache
def extension(point: str) -> Any:
    """Return what was registered at `point`, None if it was taken off."""
    try:
        return needed(point)
    except ModuleNotFoundError as error:
        module = _added[point].partition(":")[0]
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it lacks something else
        return None


def loaded(point: str) -> Any:
    """Return what `extension` does if that module has been imported, else None."""
    return extension(point) if _added[point].partition(":")[0] in sys.modules else None
