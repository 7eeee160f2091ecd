"""Which threads of the script wait for a call, and whether any of them could make another one.

A rank is blocked when no thread of its script can make another call until a pending one ends. When all ranks are
blocked and no call is pending on all of them, no call can ever run.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import sysconfig
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ("awaited", "is_blocked", "waiting_for")

_waiting: dict[int, object] = {}
"""Thread -> the request for which it waits."""

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_CALL = re.compile(r'  File "(.*)", line .* in (.*)')
_LIBRARIES = tuple(
    path.encode("ascii", "backslashreplace").decode()
    for path in (
        *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")),
        str(Path(__file__).resolve().parents[1]),
        "<frozen ",
    )
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
    stacks = _stacks()
    if stacks is None:
        return False
    stuck = {thread for thread in stacks if _waiting.get(thread) in pending}
    in_backward = any(_is_native(thread) for thread in stuck)
    for thread in stacks.keys() - stuck:
        if in_backward and _runs_backward(stacks[thread]):
            continue
        if thread == threading.main_thread().ident or _runs_script(thread, stacks[thread]):
            return False
    return True


class _Call(NamedTuple):
    """A function that a thread runs."""

    file: str
    """Characters outside ASCII are escaped. Empty: the thread runs more functions than are listed."""
    name: str


def _stacks() -> dict[int, list[_Call]] | None:
    """Return what each thread runs, the most recent call first; None if there are too many threads (100).

    faulthandler reads the stacks in one step, in which no other thread of Python runs, and makes no frame objects.
    While another thread was running, a segmentation fault was seen once in a walk along `f_back`, which does both.
    """
    with open(os.memfd_create("stacks"), "r+", encoding="ascii") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        lines = file.read().splitlines()
    stacks: dict[int, list[_Call]] = {}
    stack: list[_Call] = []
    for line in lines:
        if found := _THREAD.match(line):
            stack = stacks.setdefault(int(found[1], 16), [])
        elif found := _CALL.match(line):
            stack.append(_Call(found[1], found[2]))
        elif line == "  ...":
            stack.append(_Call("", ""))
        elif line == "...":
            return None
    return stacks


def _is_native(thread: int) -> bool:
    """Return whether a library in C++ has started the thread, as autograd does for each GPU."""
    return isinstance(threading._active.get(thread), threading._DummyThread | None)  # type: ignore[attr-defined]


def _runs_backward(stack: Sequence[_Call]) -> bool:
    """Return whether the thread waits for the threads of autograd: for CUDA, hooks run in these."""
    return bool(stack) and stack[0].name == "_engine_run_backward"


def _runs_script(thread: int, stack: Sequence[_Call]) -> bool:
    if isinstance(threading._active.get(thread), threading.Timer):  # type: ignore[attr-defined]
        return True
    return not all(_is_library(call.file) for call in stack)


@functools.cache
def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or "site-packages" in file or "dist-packages" in file
