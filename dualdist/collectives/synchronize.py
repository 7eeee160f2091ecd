"""poll and synchronize: the results of asynchronous collectives."""

from __future__ import annotations

from typing import Any

from ..checks import integer
from ..world.context import current


def poll(handle: int) -> bool:
    """Return whether `synchronize(handle)` would return at once. Local.

    Raises ValueError for a handle that is unknown or already synchronized.
    """
    return current().handles.poll(_checked(handle))


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous collective and return its result. Local.

    Returns None for a handle that is unknown or already synchronized. Raises HorovodInternalError if the collective
    failed.
    """
    return current().handles.synchronize(_checked(handle))


def _checked(handle: Any) -> int:
    return integer("handle", handle, fix="Pass what an asynchronous call has returned.")
