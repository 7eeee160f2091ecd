"""How this process ends."""

from __future__ import annotations

import ctypes

__all__ = ("never_delete", "skip_destructors_at_exit")


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
