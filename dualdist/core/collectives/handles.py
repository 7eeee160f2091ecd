"""The handles of asynchronous collectives, which are plain integers as in Horovod."""

from __future__ import annotations

import itertools
from typing import Any

from ..checks import integer
from ..compiling import not_compiled
from ..world.context import current

_numbers = itertools.count()


def new_handle(started: Any) -> int:
    """Return a new handle for `started`, a Request of a channel, or on devices what has its `ended` and `get`."""
    handle = next(_numbers)
    current().handles[handle] = started
    return handle


@not_compiled
def poll(handle: int) -> bool:
    """Return whether `synchronize(handle)` would return at once. Local.

    Raises ValueError for a handle that is unknown or already synchronized.
    """
    started = current().handles.get(_checked(handle))
    if started is None:
        raise ValueError(
            f"`handle` must be outstanding, but {handle} is unknown or was synchronized already. Pass what an "
            "asynchronous call has returned."
        )
    return bool(started.ended)


@not_compiled
def synchronize(handle: int) -> Any:
    """Wait for an asynchronous collective and return its result. Local.

    Returns None for a handle that is unknown or already synchronized. Raises HorovodInternalError if it failed.
    """
    started = current().handles.pop(_checked(handle), None)
    return None if started is None else started.get()


def _checked(handle: Any) -> int:
    return integer("handle", handle, fix="Pass what an asynchronous call has returned.")
