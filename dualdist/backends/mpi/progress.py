"""The progress thread: it moves data while Python computes, since MPI moves data only inside its own calls.

A call that has started is a "work" (work.py). To "test" it is to ask MPI whether it has ended, and MPI moves its data
meanwhile. A thread that waits for a work tests it itself, which saves a thread switch, and the progress thread then
tests less often. When no work is pending, the progress thread sleeps until the next one starts.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from typing import Any, Protocol

__all__ = ("Pending", "Progress", "progress")

_SHORT_SECONDS, _LONG_SECONDS = 5e-5, 1e-3
_QUICK_TESTS = 16
"""How many tests in a row may find no progress before the pauses between them grow."""
_BUSY_SECONDS = 2e-5
"""A test that takes longer has moved data, and the next one probably will too."""
_LINGER_SECONDS = 0.02
"""How long the thread polls after the last work before it sleeps: waking it costs more than a few tests."""
_JOIN_SECONDS = 5.0


class Pending(Protocol):
    """The part of a work that the thread uses."""

    owner: object

    def poll(self) -> bool:
        """Test it. Return whether it has ended."""

    def expire(self, now: float) -> None:
        """End it with an error if its deadline has passed. now: time.monotonic()."""

    def give_up(self, problem: str) -> None:
        """End it with an error."""


class Progress:
    """All pending works of this process, and the thread that tests them."""

    def __init__(self) -> None:
        self.calls: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        """Held during every MPI call: a lock if MPI allows only one call at a time."""
        self.serial = False
        """Whether MPI allows only one call at a time (MPI_THREAD_SERIALIZED)."""
        self.forked = False
        """Whether this process was forked from one that uses MPI."""
        self.waiting: set[object] = set()
        """The works that other threads test."""
        self._pending: dict[Pending, None] = {}
        self._owners: set[object] = set()
        self._thread: threading.Thread | None = None
        self._wake_event = threading.Event()
        self._awake = False
        self._stopping = False
        self._quiet = 0
        self._sweeping = threading.RLock()
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._in_child
        )

    def enter(self, owner: object) -> None:
        """Keep the thread until `owner` leaves."""
        if not self._owners:
            atexit.unregister(self.stop)
            atexit.register(self.stop)  # the newest handler runs first: before MPI's
        self._owners.add(owner)

    def leave(self, owner: object) -> None:
        """Give up the pending works of `owner`. When it is the last owner, end the thread."""
        for work in list(self._pending):
            if work.owner is owner and not work.poll():
                work.give_up("its process group was destroyed")
        self._owners.discard(owner)
        if not self._owners:
            self.stop()

    def add(self, work: Pending) -> None:
        """Test `work` until it ends."""
        self._pending[work] = None
        self._quiet = 0
        if not self._awake:
            self._wake()

    def forget(self, work: Pending) -> None:
        """Stop testing `work`."""
        self._pending.pop(work, None)

    def stop(self) -> None:
        """End the thread. The next work starts another one."""
        thread, self._thread = self._thread, None
        if thread is None or self.forked:
            return
        self._stopping = True
        self._wake_event.set()
        if thread is not threading.current_thread():  # equal if a callback of a future leaves the world
            thread.join(_JOIN_SECONDS)
        self._awake = False

    def _wake(self) -> None:
        self._awake = True
        if self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(target=self._run, name="dualdist-mpi", daemon=True)
            self._thread.start()
        self._wake_event.set()

    def _run(self) -> None:
        idle_since = time.monotonic()
        while not self._stopping:
            if self._pending:
                time.sleep(self._pause(self._sweep()))
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since < _LINGER_SECONDS:
                time.sleep(_LONG_SECONDS)
            else:
                self._sleep()
                idle_since = time.monotonic()

    def _sleep(self) -> None:
        self._wake_event.clear()
        self._awake = False
        # `add` writes _pending and then reads _awake. Here the order is reversed, so no wake-up is lost.
        if not self._pending and not self._stopping:
            self._wake_event.wait()
        self._awake = True

    def _sweep(self) -> bool:
        """Test every work. Return whether data has probably moved."""
        start = time.monotonic()
        with self._sweeping:
            ended, works = 0, list(self._pending)
            for work in works:
                if work not in self.waiting:
                    ended += work.poll()
                work.expire(start)
        return ended > 0 or time.monotonic() - start > _BUSY_SECONDS * len(works)

    def _pause(self, moved: bool) -> float:
        """Return how many seconds to sleep before the next test."""
        if self.waiting:
            return _LONG_SECONDS
        if moved:
            self._quiet = 0
            return 0.0
        self._quiet += 1
        growth = max(0, self._quiet - _QUICK_TESTS) / 4
        return min(_LONG_SECONDS, _SHORT_SECONDS * float(2.0 ** min(growth, 10.0)))

    def _before_fork(self) -> None:
        """Keep the progress thread out of MPI while the fork copies the memory, if its callbacks end within 1 s."""
        self._held = self._sweeping.acquire(timeout=1.0)

    def _after_fork(self) -> None:
        if self._held:
            self._sweeping.release()

    def _in_child(self) -> None:
        self.forked = "mpi4py.MPI" in sys.modules
        self._thread = None
        self._awake = self.forked


progress = Progress()
"""The single instance of this process."""
