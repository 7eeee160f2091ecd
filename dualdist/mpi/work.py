"""What a call of the process group returns, with its pending MPI requests, and the thread that tests all of these."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..core.compiling import not_compiled
from ..core.process import Worker, in_thread
from . import meeting as mpi
from .communicator import Operation

# The progress thread: it moves data while Python computes, since MPI moves data only inside its own calls.
#
# A call that has started is a "work" (`MpiWork`). To "test" it is to ask MPI whether it has ended, and MPI moves its
# data meanwhile. A thread that waits for a work tests it itself, which saves a thread switch, and the progress thread
# then tests less often. When no work is pending, the progress thread sleeps until the next one starts.

_SHORT_SECONDS, _LONG_SECONDS = 5e-5, 1e-3
_GROWTH = 1.1
_BUSY_SECONDS = 2e-5
"""A test that takes longer has moved data, and the next one probably will too."""
_LINGER_SECONDS = 0.02
"""How long the thread polls after the last work before it sleeps: waking it costs more than a few tests."""
_END_SECONDS = 5.0
"""How long the end of a process group waits for its works, and that of the process for threads."""


class Progress:
    """All pending works of this process, and the thread that tests them."""

    def __init__(self) -> None:
        self.calls: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        """Held during every MPI call: a lock if MPI allows only one call at a time (MPI_THREAD_SERIALIZED)."""
        self.forked = False
        """Whether this process was forked from one that uses MPI."""
        self.waiting: set[object] = set()
        """The works that other threads test."""
        self.pending: dict[MpiWork, None] = {}
        self._owners: set[object] = set()
        self._worker = Worker(self._step, "dualdist-mpi")
        self._pause = 0.0
        self._idle_since = 0.0
        self._sweeping = threading.RLock()
        self.callbacks: set[concurrent.futures.Future[None]] = set()
        """Threads that set the results of futures. The interpreter ends after them."""
        os.register_at_fork(before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._in_child)

    def enter(self, owner: object) -> None:
        """Keep the thread until `owner` leaves."""
        if not self._owners:
            atexit.unregister(self._end)
            atexit.register(self._end)  # the newest handler runs first: before MPI's
        self._owners.add(owner)

    def leave(self, owner: Any) -> None:
        """Give up the pending works of `owner`. When it is the last owner, end the thread.

        If it has given up none, the other members are probably there: wait a little for all works to end.
        """
        deadline = time.monotonic() + (0.0 if owner.unsettled else _END_SECONDS)
        for work in [work for work in list(self.pending) if work.owner is owner]:
            if (seconds := deadline - time.monotonic()) > 0:
                with contextlib.suppress(RuntimeError):  # it is late
                    work._wait(seconds)
            if not work.is_completed():
                work.give_up("its process group was destroyed")
        self._owners.discard(owner)
        if not self._owners:
            self._worker.stop(_END_SECONDS)

    def add(self, work: MpiWork) -> None:
        """Test `work` until it ends."""
        self.pending[work] = None
        self._pause = 0.0
        self._worker.wake()

    def _end(self) -> None:
        """At exit: end the threads. Python ends others when they return from torch, and then C++ aborts the process."""
        if not self.forked:
            self._worker.stop(_END_SECONDS)
            concurrent.futures.wait(list(self.callbacks), _END_SECONDS)

    def _step(self) -> float | None:
        """Test all works. Return how long to sleep before the next test: not after progress, then longer each time."""
        if not self.pending:
            return _LONG_SECONDS if time.monotonic() - self._idle_since < _LINGER_SECONDS else None
        has_moved = self._sweep()
        self._idle_since = time.monotonic()
        if self.waiting:
            return _LONG_SECONDS
        self._pause = 0.0 if has_moved else min(_LONG_SECONDS, max(_SHORT_SECONDS, _GROWTH * self._pause))
        return self._pause

    def _sweep(self) -> bool:
        """Test every work. Return whether data has probably moved."""
        start = time.monotonic()
        with self._sweeping:
            ended, works = 0, list(self.pending)
            for work in works:
                if work not in self.waiting:
                    ended += work.is_completed()
                if work.deadline is not None and start > work.deadline:
                    work.time_out()
        return ended > 0 or time.monotonic() - start > _BUSY_SECONDS * len(works)

    def _before_fork(self) -> None:
        """Keep the progress thread out of MPI while the fork copies the memory, if its callbacks end within 1 s."""
        self._held = self._sweeping.acquire(timeout=1.0)

    def _after_fork(self) -> None:
        if self._held:
            self._sweeping.release()

    def _in_child(self) -> None:
        self.forked = "mpi4py.MPI" in sys.modules


progress = Progress()
"""The single instance of this process."""


FORKED = (
    "MPI: a process group must be used by the process that joined it, but is used in a forked child instead. "
    "Use it only in the parent, or start the child by spawning."
)

_SPIN_SECONDS, _SLEEP_SECONDS = 0.2, 0.001
_NO_LIMIT = timedelta(0)
given_up: list[object] = []
"""Requests that were given up, and their buffers: MPI may still write to them when the late rank arrives."""


@not_compiled
class MpiWork(dist.Work):
    """Pending MPI requests. The progress thread and waiting threads test them."""

    def __init__(
        self,
        what: str,
        owner: Any,
        requests: list[Any],
        operations: Sequence[Operation],
        *,
        result: list[torch.Tensor],
        range_: Any = None,
        status: Any = None,
        seconds: float | None = None,
        expires: bool = True,
    ) -> None:
        """Take over the `requests` of `operations`. They are tested from the last to the first.

        what: the call, for error messages. range_: a future that ends a range of the profiler. status: an MPI status
        that the last request fills. seconds: the timeout, by default the group's. expires: whether the work fails once
        the timeout has passed since its start. A call of `wait` always fails after the timeout.
        """
        super().__init__()
        self.owner = owner
        self._what = what
        self._requests = requests
        self._operations = operations
        self._result = result
        self._range = range_
        self._status = status
        self._timeout = float(owner.seconds) if seconds is None else seconds
        self.deadline = time.monotonic() + self._timeout if expires else None
        self._waited_since: float | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._problem: str | None = None
        self._future: Any = None

    def is_completed(self) -> bool:
        if self._ended:
            return True
        if progress.forked:
            raise RuntimeError(FORKED)
        if not self._lock.acquire(blocking=False):  # another thread tests it
            return False
        try:
            if not self._ended:
                if not self._test_requests():
                    return False
                for operation in self._operations:
                    next(operation, None)
                self._end(None)
        except Exception as error:
            self._end(str(error))
        finally:
            self._lock.release()
        self._fulfil_future()
        return True

    Test = is_completed  # so that a work of coalesced calls can test its works like MPI requests

    def _test_requests(self) -> bool:
        """Return whether all requests have completed."""
        while self._requests:
            with progress.calls:
                request = self._requests[-1]
                if not (request.Test() if self._status is None else request.Test(self._status)):
                    return False
            self._requests.pop()
        return True

    def time_out(self) -> None:
        self.give_up(f"it timed out after {self._timeout:g} s, since a member did not take part")

    def give_up(self, problem: str) -> None:
        with self._lock:
            if self._ended:
                return
            given_up.append((self._requests, self._operations))
            self.owner.unsettled = mpi.has_unfinished = True
            self._end(problem)
        self._fulfil_future()

    def _end(self, problem: str | None) -> None:
        if problem is not None:
            self._problem = f"MPI: {self._what} failed on {self.owner}: {problem}."
        if self._range is not None:
            # Before a waiting thread can see the end and stop the profiler, whose memory the range writes to.
            self._range.set_result(None)
        self._ended = True
        self._operations = ()
        progress.pending.pop(self, None)

    def _fulfil_future(self) -> None:
        """Set the result of the future, if there is one, in another thread.

        A callback may wait for another collective, as PowerSGD's does, which only the progress thread can complete.
        """
        with self._lock:
            future, self._future = self._future, None
        if future is not None:
            step = functools.partial(_fulfil, future, self._result, self._problem)
            running = in_thread(step, "dualdist-mpi-callbacks")
            progress.callbacks.add(running)
            running.add_done_callback(progress.callbacks.discard)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        if not self.is_completed():
            self._wait(timeout.total_seconds())
        if self._problem is not None:
            raise RuntimeError(self._problem)
        return True

    def _wait(self, asked: float) -> None:
        start = time.monotonic()
        if self._waited_since is None:
            self._waited_since = start
        limit = asked if asked > 0 else self._timeout
        progress.waiting.add(self)
        try:
            while not self.is_completed():
                now = time.monotonic()
                if now - start > limit:
                    if asked > 0:
                        raise RuntimeError(f"MPI: {self._what} timed out after {limit:g} s on {self.owner}.")
                    self.time_out()
                time.sleep(0 if now - self._waited_since < _SPIN_SECONDS else _SLEEP_SECONDS)
        finally:
            progress.waiting.discard(self)

    def synchronize(self) -> None:
        self.wait()

    def is_success(self) -> bool:
        return self.is_completed() and self._problem is None

    def exception(self) -> RuntimeError | None:
        return None if self._problem is None else RuntimeError(self._problem)

    def result(self) -> list[torch.Tensor]:
        return self._result

    def _source_rank(self) -> int:
        self.wait()
        return int(self._status.Get_source())

    source_rank = _source_rank

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        with self._lock:
            if not self._ended:
                first, self._future = self._future, self._future or future
                return first or future
        _fulfil(future, self._result, self._problem)
        return future


def _fulfil(future: Any, result: list[torch.Tensor], problem: str | None) -> None:
    if problem is None:
        future.set_result(result)
    else:
        future.set_exception(RuntimeError(problem))
