"""Runs the collectives of one group in the order of the calls.

A collective is a generator, which yields what it waits for (rounds.py). It is queued, then runs, and ends, with or
without a problem; after the first problem of a group, all others end with the same one. Only the first collective of
the queue runs, in the thread that holds the lock: in any that waits for a collective, and while none does, in a worker
thread. So collectives make progress while the caller computes, and a caller that waits needs no switch of threads.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections import deque
from socket import socket

import torch

from ...errors import HorovodInternalError, StallError
from ...executor import Worker
from ..base import Work
from .mesh import Mesh
from .rounds import CollectiveSteps

_LAST_SECONDS = 1.0
_LOOK_SECONDS = 0.5
"""How often a member that waits for other hosts checks whether the members of its own host are still there."""
_LONGEST_POLL = 2**31 - 1
"""The longest timeout of poll(2): milliseconds in a C int."""


class CollectiveQueue:
    """The collectives that were started and have not ended."""

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        """timeout: seconds until a collective that waits for another member fails."""
        self._mesh = mesh
        self.timeout = timeout
        self._queued: deque[SharedMemoryWork] = deque()
        self._lock = threading.RLock()
        """Held by the thread that runs a collective. Reentrant: a signal handler may interrupt this thread."""
        self._is_running = False
        """Whether a thread that waits for a collective runs one."""
        self._waiting: list[SharedMemoryWork] = []
        """What threads wait for. They run it themselves."""
        self._worker = Worker(self._run_first, "dualdist-shared-memory")
        self._problem: HorovodInternalError | None = None
        """Why no collective can run any more."""

    def start(self, steps: CollectiveSteps, *, at_once: bool = False) -> SharedMemoryWork:
        """Queue a collective.

        at_once: run it in this thread until it must wait. For a small one, or one for which the caller waits soon: of
        two members, no other thread continues it.
        """
        work = SharedMemoryWork(self, steps)
        self._queued.append(work)
        if at_once:
            self.test(work)
            # After the only round of a small one, the other one of two members needs nothing more from this one.
            if work.deadline is not None and (work.ended or self._mesh.is_pair):
                return work
        self._worker.wake()
        return work

    def finish(self, work: SharedMemoryWork, seconds: float | None = None) -> None:
        """Run `work`, for at most `seconds`. Its problem is in the work.

        Raises RuntimeError in a signal handler or destructor that interrupts another collective of this thread.
        """
        until = None if seconds is None else time.monotonic() + seconds
        self._waiting.append(work)
        try:
            if not self._lock.acquire(timeout=-1 if seconds is None else seconds):
                return
            try:
                if not self._run(work, until):
                    raise RuntimeError(
                        "A collective must not wait in a signal handler or destructor that interrupts another one: "
                        "each would wait for the other. Let the handler set a flag, and check it after each step."
                    )
            finally:
                self._lock.release()
        finally:
            self._waiting.remove(work)
            if self._queued:
                self._worker.wake()

    def test(self, work: SharedMemoryWork) -> None:
        """Run `work` as far as is possible without waiting."""
        if not work.ended and self._lock.acquire(blocking=False):
            try:
                self._run(work, 0.0)
            finally:
                self._lock.release()

    def abort(self) -> None:
        """Give up all collectives. The other members notice it. Local."""
        self._fail(HorovodInternalError("this rank has given up its collectives"))

    def close(self) -> None:
        """End the thread and the connections. Local."""
        self._mesh.close()
        self._worker.stop(_LAST_SECONDS)

    def _run(self, work: SharedMemoryWork, until: float | None) -> bool:
        """Run `work` until it ends or `until` has passed. Return False if this thread is running another one."""
        if self._is_running:
            return False
        try:
            self._is_running = True
            while not work.ended and self._advance(self._queued[0], until):
                pass
        finally:
            self._is_running = False
        return True

    def _run_first(self) -> float | None:
        """Run the first collective until it ends, unless threads wait for one and run it themselves."""
        if not self._queued or self._waiting:
            return None
        # What happened is in the work, for the thread that will wait for it.
        with self._lock, contextlib.suppress(Exception):
            if self._queued and not self._waiting:
                self._advance(self._queued[0], None)
        return 0.0

    def _advance(self, work: SharedMemoryWork, until: float | None) -> bool:
        """Run `work`, the first one, until it ends or `until` has passed. Return whether it ended."""
        if work.deadline is None:
            work.deadline = time.monotonic() + self.timeout
        try:
            if self._problem is not None:
                raise self._problem
            # A tensor made in inference mode can only be written in that mode.
            with torch.inference_mode():
                for awaited in work.steps:
                    limit = work.deadline if until is None else min(until, work.deadline)
                    if self._has_arrived(awaited, limit):
                        work.deadline = time.monotonic() + self.timeout
                    elif time.monotonic() < work.deadline:
                        return False
                    else:
                        raise StallError("A rank sent nothing in time.")
        except HorovodInternalError as error:
            self._end(work, error)
        except BaseException as error:
            self._end(work, HorovodInternalError(f"a collective in shared memory was interrupted: {error!r}"))
            # These: another thread has closed the socket.
            if not isinstance(error, (OSError, ValueError, KeyError)):
                raise
        else:
            self._end(work)
        return True

    def _end(self, work: SharedMemoryWork, problem: HorovodInternalError | None = None) -> None:
        if problem is not None:
            self._fail(problem)
            work.problem = self._problem
        work.steps = iter(())
        work.ended = True
        self._queued.popleft()

    def _has_arrived(self, awaited: socket | Work, until: float) -> bool:
        """Wait until `until` for the data of a socket, or for a collective. Return whether it is there."""
        if not isinstance(awaited, Work):
            poll = select.poll()
            poll.register(awaited, select.POLLIN)
            left = 1e3 * max(0.0, until - time.monotonic())
            return bool(poll.poll(min(_LONGEST_POLL, left)))
        while not awaited.done():
            left = until - time.monotonic()
            if left <= 0:
                return False
            awaited.wait_for(min(left, _LOOK_SECONDS))
            self._mesh.check()
        return True

    def _fail(self, problem: HorovodInternalError) -> None:
        """Let every later collective fail, on the other members too."""
        if self._problem is None:
            self._problem = problem
            self._mesh.close()


class SharedMemoryWork(Work):
    """A collective in shared memory."""

    def __init__(self, queue: CollectiveQueue, steps: CollectiveSteps) -> None:
        self._queue = queue
        self.steps = steps
        self.deadline: float | None = None
        """Until when another member must have sent something; None until the collective runs."""
        self.ended = False
        self.problem: HorovodInternalError | None = None

    def wait(self) -> None:
        if not self.ended:
            self._queue.finish(self)
        if self.problem is not None:
            raise type(self.problem)(str(self.problem)) from self.problem

    def wait_for(self, seconds: float) -> None:
        if not self.ended:
            self._queue.finish(self, seconds)

    def done(self) -> bool:
        self._queue.test(self)
        return self.ended
