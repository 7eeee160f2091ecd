"""Handles of asynchronous collectives: plain integers, as in Horovod."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import Any

__all__ = ("HandleTable",)


class HandleTable:
    """The outstanding handles of one world."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._futures: dict[int, Future[Any]] = {}
        self._names: dict[str, Future[Any]] = {}

    def add(self, future: Future[Any], name: str | None = None) -> int:
        """Return a new handle for `future`, a collective called `name`."""
        handle = next(self._numbers)
        self._futures[handle] = future
        if name is not None:
            self._names[name] = future
            future.add_done_callback(lambda done: self._names.pop(name, None))
        return handle

    def is_outstanding(self, name: str) -> bool:
        """Return whether a collective called `name` has not finished yet."""
        return name in self._names

    def poll(self, handle: int) -> bool:
        """Return whether the result is ready. Raises ValueError for a handle that is unknown or was used."""
        if handle not in self._futures:
            raise ValueError(
                f"`handle` must be outstanding, but {handle} is unknown or was synchronized already."
            )
        return self._futures[handle].done()

    def synchronize(self, handle: int) -> Any:
        """Wait and return the result; None for a handle that is unknown or was used (mpi_ops.py:1281)."""
        future = self._futures.pop(handle, None)
        return None if future is None else future.result()
