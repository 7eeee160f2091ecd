"""Which threads of the script wait for a call, and whether any of them could make another one.

A rank is blocked when no thread of its script can make another call until a pending one ends. When all ranks are
blocked and no call is pending on all of them, no call can ever run.
"""

from __future__ import annotations

import functools
import gc
import sys
import sysconfig
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

__all__ = ("awaited", "is_blocked", "waiting_for")

_waiting: dict[int, object] = {}
"""Thread -> the request for which it waits."""

_one_at_a_time = threading.RLock()

_LIBRARIES = (
    *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")),
    str(Path(__file__).resolve().parents[1]),
    "<frozen ",
)


class waiting_for:
    """A context manager: in its block, also inside another such block, this thread waits for `request`."""

    def __init__(self, request: object) -> None:
        self._request = request
        self._former: object | None = None

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._former = _waiting.get(thread)
        _waiting[thread] = self._request

    def __exit__(self, *raised: object) -> None:
        thread = threading.get_ident()
        if self._former is None:
            _waiting.pop(thread, None)
        else:
            _waiting[thread] = self._former


def awaited() -> frozenset[object]:
    """Return the requests for which threads wait."""
    return frozenset(list(_waiting.values()))


def is_blocked(pending: Collection[object]) -> bool:
    """Return whether each thread that could make another call waits for a request in `pending`.

    The main thread and threads that run code of the script can make calls. Threads that run only library code, such as
    idle threads of a pool, are assumed to wait for these; a timer is not.
    """
    with _no_garbage_collection():
        frames = sys._current_frames()
        stuck = {thread for thread in frames if _waiting.get(thread) in pending}
        in_backward = any(_is_native(thread) for thread in stuck)
        for thread in frames.keys() - stuck:
            if in_backward and _runs_backward(frames[thread]):
                continue
            if thread == threading.main_thread().ident or _runs_script(thread, frames[thread]):
                return False
        return True


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect no garbage in the block.

    `f_back` creates a frame. Until Python 3.12 that can begin a collection, in which other threads run and may leave
    the frame that is being created. One segmentation fault in the walk was seen; this is a possible cause, not proven.
    sys._current_frames collects nothing either (github.com/python/cpython/issues/106883, a deadlock). The text of
    faulthandler is no replacement: it crashed beside Horovod, whose thread creates a thread state without the GIL when
    it drops a tensor, and faulthandler reads the half-made state.
    """
    with _one_at_a_time:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


def _is_native(thread: int) -> bool:
    """Return whether a library in C++ has started the thread, as autograd does for each GPU."""
    return isinstance(threading._active.get(thread), threading._DummyThread | None)  # type: ignore[attr-defined]


def _runs_backward(frame: FrameType) -> bool:
    """Return whether the thread waits for the threads of autograd: for CUDA, hooks run in these."""
    return frame.f_code.co_name == "_engine_run_backward"


def _runs_script(thread: int, frame: FrameType | None) -> bool:
    if isinstance(threading._active.get(thread), threading.Timer):  # type: ignore[attr-defined]
        return True
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None


@functools.cache
def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or "site-packages" in file or "dist-packages" in file
