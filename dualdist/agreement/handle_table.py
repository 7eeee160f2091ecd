"""Handles of asynchronous collectives: plain integers, as in Horovod."""

from __future__ import annotations

import itertools
from typing import Any

from .result import Result

__all__ = ("HandleTable",)


class HandleTable:
    """The outstanding handles of one world."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._results: dict[int, Result[Any]] = {}

    def add(self, result: Result[Any]) -> int:
        """Return a new handle for `result`."""
        handle = next(self._numbers)
        self._results[handle] = result
        return handle

    def poll(self, handle: int) -> bool:
        """Return whether the result is ready. Raises ValueError for a handle that is unknown or was used."""
        if handle not in self._results:
            raise ValueError(
                f"`handle` must be outstanding, but {handle} is unknown or was synchronized already. Pass what an "
                "asynchronous call has returned."
            )
        return self._results[handle].done()

    def synchronize(self, handle: int) -> Any:
        """Wait and return the result; None for a handle that is unknown or was used (mpi_ops.py:1281)."""
        result = self._results.pop(handle, None)
        return None if result is None else result.get()
