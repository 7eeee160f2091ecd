"""A call of this rank until it has ended, and what wakes the thread that runs it."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from .call import Call, Record
from .guard import waiting_for
from .matching import Execute, PendingCall

T = TypeVar("T")

_WAIT_SECONDS = 0.5
"""How long a thread waits at a time. A signal may not interrupt a wait: its handler then runs after it."""


class Request(Generic[T]):
    """A call of this rank, and its result.

    Python may run a signal handler after any instruction of the main thread. `concurrent.futures.Future` holds a lock
    during some of them. A handler that runs there, and waits for a later call, then stops the thread that runs both
    calls. Here a handler never needs a lock that its thread holds.
    """

    def __init__(self, state: int, call: Call, execute: Execute[T] | None = None, error: str = "") -> None:
        """Make the request.

        Args:
            state: ACTIVE, JOINED or FAILED, as matching.py defines them.
            execute: None for a call that only takes part in the agreements.
            error: for FAILED: the error that this rank raised.
        """
        self.state, self.call, self.execute = state, call, execute
        self.issued = time.time_ns()
        self.record = Record(call, self.issued)
        self.ended = False
        """Whether `get` would return at once."""
        self.on_wait: Callable[[], None] = lambda: None
        """Called when a thread begins to wait for the result: the others must learn that this rank may be blocked."""
        self.on_waited: Sequence[Callable[[Record, int], None]] = ()
        """Called when a thread has waited for the result."""
        self._failure_text = error
        self._value: Any = None
        self._error: BaseException | None = None
        self._unended = threading.Lock()
        """A gate: held until the request has ended. Each thread that waits passes it on to the next."""
        self._unended.acquire()

    @functools.cached_property
    def listed(self) -> PendingCall:
        """What other members see of it in a list of pending calls: without its data."""
        return PendingCall(self.state, replace(self.call, payload=b""), self._failure_text, self.issued)

    def end(self, value: T | None = None, error: BaseException | None = None) -> None:
        """Let `get` return `value` or raise `error`, unless the result is there already."""
        if not self.ended:
            self._value, self._error = value, error
            self.execute = None  # it may hold tensors
            self.record.ended = time.time_ns()
            self.ended = True
            self._unended.release()

    def get(self) -> T:
        """Wait for the result, and return it or raise its exception."""
        if not self.ended:
            since = time.time_ns()
            with waiting_for(self):
                self.on_wait()
                while not self._unended.acquire(timeout=_WAIT_SECONDS):
                    pass
                self._unended.release()
            for waited in self.on_waited:
                waited(self.record, since)
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]


# Wakes the thread that runs a channel when the script makes a call or begins to wait for one.


class News:
    """A wake-up signal between threads that can be waited for together with sockets."""

    def __init__(self) -> None:
        self._pair: tuple[socket.socket, socket.socket] | None = None
        """The reading and the writing end; made when a thread first waits."""
        self._listening = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[socket.socket]:
        """Yield a socket that becomes readable after `give`. Only one thread at a time may listen."""
        if self._pair is None:
            self._pair = socket.socketpair()
            for end in self._pair:
                end.setblocking(False)
        self._listening = True
        try:
            yield self._pair[0]
        finally:
            self._listening = False

    def give(self) -> None:
        """Wake the thread that listens, if one does."""
        if self._listening and self._pair is not None:
            with contextlib.suppress(OSError):  # full: the thread wakes anyway
                self._pair[1].send(b"\0")

    def clear(self) -> None:
        """Forget the signals until now."""
        if self._pair is not None:
            with contextlib.suppress(BlockingIOError):
                while self._pair[0].recv(4096):
                    pass

    def close(self) -> None:
        """Free the sockets. Local, also in a forked process."""
        for end in self._pair or ():
            end.close()
        self._pair = None
