"""Runs the collectives of one group in the order of the calls: in a thread, while the caller computes.

A thread that waits for a collective runs it itself, and those before it, unless the thread has begun with it.
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
from ..base import Work
from .mesh import Mesh
from .rounds import Steps

_LAST_SECONDS = 1.0
_LOOK_SECONDS = 0.5
"""How often a member that waits for other hosts checks whether the members of its own host are still there."""
_LONGEST_POLL = 2**31 - 1
"""The longest timeout of poll(2): milliseconds in a C int."""


class Works:
    """The collectives that were started and have not ended, and the thread that runs them."""

    def __init__(self, mesh: Mesh, name: str, timeout: float) -> None:
        """name: of the thread. timeout: seconds until a collective that waits for another member fails."""
        self._mesh, self._name = mesh, name
        self.timeout = timeout
        self._queue: deque[SharedWork] = deque()
        self._running = threading.RLock()
        """Held by the thread that runs a collective. Reentrant: a signal handler may interrupt this thread."""
        self._is_running = False
        """Whether a thread that waits for a collective runs one."""
        self._waiting: list[SharedWork] = []
        """What other threads wait for. They run it themselves."""
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._problem: HorovodInternalError | None = None
        """Why no collective can run any more."""
        self._closed = False

    def add(self, steps: Steps) -> SharedWork:
        """Queue a collective."""
        work = SharedWork(self, steps)
        self._queue.append(work)
        self._proceed()
        return work

    def begin(self, steps: Steps) -> SharedWork:
        """Queue a collective, and run it in this thread until it must wait.

        For a small one, or one for which the caller waits soon: of two members, no other thread continues it.
        """
        work = SharedWork(self, steps)
        self._queue.append(work)
        self.test(work)
        # After the only round of a small one, the other one of two members needs nothing more from this one.
        if work.deadline is None or not (work.ended or self._mesh.is_pair):
            self._proceed()
        return work

    def finish(self, work: SharedWork, seconds: float | None = None) -> None:
        """Run `work`, for at most `seconds`. Its problem is in the work.

        Raises RuntimeError in a signal handler or destructor that interrupts another collective of this thread.
        """
        until = None if seconds is None else time.monotonic() + seconds
        self._waiting.append(work)
        try:
            if not self._running.acquire(timeout=-1 if seconds is None else seconds):
                return
            try:
                if not self._run(work, until):
                    raise RuntimeError(
                        "A collective must not wait in a signal handler or destructor that interrupts another one: "
                        "each would wait for the other. Let the handler set a flag, and check it after each step."
                    )
            finally:
                self._running.release()
        finally:
            self._waiting.remove(work)
            if self._queue:
                self._proceed()

    def test(self, work: SharedWork) -> None:
        """Run `work` as far as is possible without waiting."""
        if not work.ended and self._running.acquire(blocking=False):
            try:
                self._run(work, 0.0)
            finally:
                self._running.release()

    def _run(self, work: SharedWork, until: float | None) -> bool:
        """Run `work` until it ends or `until` has passed. Return False if this thread is running another one."""
        if self._is_running:
            return False
        try:
            self._is_running = True
            while not work.ended and self._advance(self._queue[0], until):
                pass
        finally:
            self._is_running = False
        return True

    def abort(self) -> None:
        """Give up all collectives. The other members notice it. Local."""
        self._fail(HorovodInternalError("this rank has given up its collectives"))

    def close(self) -> None:
        """End the thread and the connections. Local."""
        self._closed = True
        self._mesh.close()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LAST_SECONDS)

    def abandon(self) -> None:
        """In a forked process, close its copies of the sockets. Local."""
        self._mesh.abandon()

    def _proceed(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._wake.set()

    def _work(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            while self._queue and not self._waiting and not self._closed:
                # What happened is in the work, for the thread that will wait for it.
                with self._running, contextlib.suppress(Exception):
                    if self._queue and not self._waiting:
                        self._advance(self._queue[0], None)

    def _advance(self, work: SharedWork, until: float | None) -> bool:
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
                        continue
                    if time.monotonic() < work.deadline:
                        return False
                    raise StallError("A rank sent nothing in time.")
        except HorovodInternalError as error:
            self._fail(error)
            work.problem = error
        except BaseException as error:
            self._fail(HorovodInternalError(f"a collective in shared memory was interrupted: {error!r}"))
            work.problem = self._problem
            work.end()
            self._queue.popleft()
            if not isinstance(
                error, (OSError, ValueError, KeyError)
            ):  # these: another thread has closed the socket
                raise
            return True
        work.end()
        self._queue.popleft()
        return True

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


class SharedWork(Work):
    """A collective in shared memory."""

    def __init__(self, works: Works, steps: Steps) -> None:
        self.steps: Steps = steps
        self.deadline: float | None = None
        self.ended = False
        self.problem: HorovodInternalError | None = None
        self._works = works

    def end(self) -> None:
        self.steps = iter(())
        self.ended = True

    def wait(self) -> None:
        if not self.ended:
            self._works.finish(self)
        if self.problem is not None:
            raise type(self.problem)(str(self.problem)) from self.problem

    def wait_for(self, seconds: float) -> None:
        if not self.ended:
            self._works.finish(self, seconds)

    def done(self) -> bool:
        self._works.test(self)
        return self.ended
