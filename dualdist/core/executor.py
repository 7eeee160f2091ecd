"""Running code in other threads: one step with a limit of time, or one step again and again.

All threads here are daemons: a step that never returns does not keep the process from ending.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from ..errors import HorovodInternalError, StallError

T = TypeVar("T")


def in_thread(step: Callable[[], T], name: str = "dualdist-step") -> Future[T]:
    """Start `step` in another thread called `name`, and return the future of its result."""
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(step())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return outcome


def in_time(step: Callable[[], T], seconds: float) -> T:
    """Return `step()`, which runs in another thread. Raises TimeoutError after `seconds`; the thread is abandoned."""
    outcome = in_thread(step)
    if not wait([outcome], seconds).done:
        raise TimeoutError(f"It did not end in {seconds:g} s.")
    return outcome.result()


class Worker:
    """A thread that repeats a step while there is something to do. It starts with the first call of `wake`."""

    def __init__(self, step: Callable[[], float | None], name: str) -> None:
        """step: returns after how many seconds it is to run again; None: after the next call of `wake`."""
        self._step, self._name = step, name
        self._thread: threading.Thread | None = None
        self._woken = threading.Event()

    def wake(self) -> None:
        """Let the step run soon. Local. Safe in a signal handler."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        if not self._woken.is_set():
            self._woken.set()

    def stop(self, seconds: float) -> None:
        """End the thread after its current step, for which to wait at most `seconds`. `wake` starts another thread."""
        thread, self._thread = self._thread, None
        self._woken.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)

    def _run(self) -> None:
        while self._thread is threading.current_thread():
            pause = self._step()
            if pause is None:
                self._woken.wait()
                self._woken.clear()
            else:
                time.sleep(pause)


# How long a collective may take: until the timeout, or until a member is lost.
#
# A rank can give up a collective after a failure and live on. No transport notices this: its Gloo, MPI or Horovod keeps
# the connections open, and the others would wait until the timeout. Horovod's Gloo controller has no timeout at all.

CHECK_SECONDS = 0.1
"""How often to ask whether a member is lost."""
_SETTLE_SECONDS = 1.0
"""How long a collective may still take when a member is lost: the transport's own error is the better one."""


class Patience:
    """The deadlines of one collective."""

    def __init__(self, has_lost_member: Callable[[], bool], timeout: float = math.inf) -> None:
        """timeout: in seconds; infinite if the transport has one of its own."""
        now = time.monotonic()
        self._deadline = now + timeout
        self._ask = has_lost_member
        self._next_check = now + CHECK_SECONDS
        self._lost_since: float | None = None

    def check(self) -> None:
        """Raise StallError after the timeout, and HorovodInternalError when a member is lost."""
        if time.monotonic() > self._deadline:
            raise StallError("A collective did not finish in time.")
        if self.has_lost_member():
            raise HorovodInternalError("a rank has left")

    def has_lost_member(self) -> bool:
        """Return whether a member was lost a while ago."""
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + CHECK_SECONDS
            if self._lost_since is None and self._ask():
                self._lost_since = now
        return self._lost_since is not None and now > self._lost_since + _SETTLE_SECONDS


def wait_for(outcome: Future[T], patience: Patience) -> T:
    """Return the result of a step. Raises StallError or HorovodInternalError when `patience` runs out first."""
    while not (outcome.done() or wait([outcome], CHECK_SECONDS).done):
        patience.check()
    return outcome.result()
