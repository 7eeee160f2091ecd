"""The result of a call that runs in another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ("Result",)

T = TypeVar("T")

_WAIT_SECONDS = 0.5
"""A signal that arrives just before a wait or in another thread does not interrupt it: its handler runs afterwards."""


class Result(Generic[T]):
    """What `compute` returns or raises, once `run` has called it in another thread.

    Python runs signal handlers between any two instructions of the main thread. `concurrent.futures.Future` holds a
    lock in some of them: a handler that waits there for a later call stops the thread that runs both. Here only the
    wait itself holds a lock, for no instruction of Python.
    """

    def __init__(self, compute: Callable[..., T]) -> None:
        self._compute: Callable[..., T] | None = compute
        self._value: T
        self._error: BaseException | None = None
        self._ended = False
        self._running = threading.Lock()
        self._running.acquire()

    def run(self, *arguments: Any) -> None:
        """Compute the result from `arguments`. Never raises."""
        assert self._compute is not None
        try:
            self._value = self._compute(*arguments)
        except BaseException as error:
            self._error = error
        self._end()

    def fail(self, error: BaseException) -> None:
        """Let `get` raise `error`, unless the result is there already."""
        if not self._ended:
            self._error = error
            self._end()

    def _end(self) -> None:
        self._compute = None  # it may hold tensors
        self._ended = True
        self._running.release()

    def done(self) -> bool:
        """Return whether `get` would return at once."""
        return self._ended

    def get(self) -> T:
        """Wait for the result, and return it or raise its exception."""
        while not self._ended:
            if self._running.acquire(timeout=_WAIT_SECONDS):
                self._running.release()
        if self._error is not None:
            raise self._error
        return self._value
