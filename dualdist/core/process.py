"""This process: running code in other threads, and how it ends.

A step runs with a limit of time, or again and again. All threads here are daemons: a step that never returns does not
keep the process from ending.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from ..errors import CollectiveMismatchError, HorovodInternalError, NotInitializedError, StallError

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


_LATER_SECONDS = 3.0
"""The interpreter of a process with torch takes up to a second to end after its exit functions. Most launchers end the
process that waits as soon as the other one has ended. No event tells this: the connections were closed before."""
_WITHOUT_A_FIRST = (CollectiveMismatchError, NotInitializedError, StallError)
"""Errors that all ranks raise at the same time, or that have nothing to do with other ranks."""


_failures: list[BaseException] = []


def record_failure(error: BaseException) -> None:
    """Let `has_failed` be true, since `error` ends the program of this process, although it is caught."""
    _failures.append(error)


def has_failed() -> bool:
    """Return whether an exception ends the program of this process, or is being handled in this thread."""
    return bool(_failures or getattr(sys, "last_value", None) or sys.exc_info()[1])


def at_exit(function: Callable[[], object]) -> Callable[[], None]:
    """Call `function` when this process ends, not in its forked processes. Return what `atexit.unregister` takes."""
    process = os.getpid()

    def call() -> None:
        if os.getpid() == process:
            function()

    return atexit.register(call)


world_has_failed = False
"""Whether a collective of the newest world has failed, so that some ranks may never end it in an orderly way."""


def never_delete(thing: object) -> None:
    """Keep `thing` from being deleted, also when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def skip_destructors_at_exit() -> None:
    """Let this process end without the destructors of C++ libraries, but with Python's exit functions and exit code.

    In a forked process, Gloo's destructors remove the parent's sockets from the epoll instance that both processes
    share, and the parent aborts (gloo/transport/tcp/loop.cc:133). Horovod's destructors wait for a thread that only the
    parent has, or that waits for a rank that has ended (horovod/common/global_state.h:117).
    """
    libc = ctypes.CDLL(None)
    # Only glibc has on_exit. The newest function runs first: _exit, with the exit code, before any destructor.
    if hasattr(libc, "on_exit"):
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def wait_after_failed_collective() -> None:
    """At exit, if a failed collective ends this process: wait, so that the rank that failed first also ends first.

    Launchers report the process that ends first with an exit code. A rank that raises an error leaves the world before
    its interpreter ends; the others notice at once, and would often end sooner.
    """
    error = getattr(sys, "last_value", None)  # of an exception that nobody has caught
    if isinstance(error, HorovodInternalError) and not isinstance(error, _WITHOUT_A_FIRST):
        time.sleep(_LATER_SECONDS)
