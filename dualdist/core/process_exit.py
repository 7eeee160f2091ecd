"""How this process ends."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import time
from collections.abc import Callable

from ..errors import CollectiveMismatchError, HorovodInternalError, NotInitializedError, StallError

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
