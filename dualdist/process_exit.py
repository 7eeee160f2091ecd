"""How this process ends."""

from __future__ import annotations

import ctypes
import sys
import time

from .errors import HorovodInternalError

__all__ = ("let_the_first_end", "never_delete", "skip_destructors_at_exit")

_LATER_SECONDS = 1.0
"""The interpreter of a process with torch takes 0.1 to 0.9 s to end after its exit functions."""


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


def let_the_first_end() -> None:
    """At exit: if a failed collective ends this process, let the rank end first that has failed first.

    Launchers report the process that ends first with an exit code, and end the others. But a rank that has raised an
    error leaves the world before its interpreter ends, and the others notice it at once: often they ended first.
    """
    if isinstance(getattr(sys, "last_value", None), HorovodInternalError):
        time.sleep(_LATER_SECONDS)
