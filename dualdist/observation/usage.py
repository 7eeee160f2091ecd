"""How the ranks spend their time: computing, loading data, waiting for other ranks, communicating.

Backward takes equally long on all ranks when it ends with a collective, so a clock outside cannot find the slow rank. A
rank that agrees on a call knows when it has made the call, when the last member has, and when the data has arrived.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch

from ..core.agreement.call import Record
from .report import Report, shares

_MAIN = threading.main_thread().ident
"""Lets the hot path know the main thread without a call of Python."""
_MOST_MARKS = 64


class _Marks:
    """How long a rank has waited by some moments, about equally far apart: what of it is noise, `combined` finds."""

    def __init__(self, now: int, waited: int) -> None:
        self._pause, self._marks = 1_000_000, [(now, waited)]
        self.next = now

    def add(self, now: int, waited: int) -> None:
        self._marks.append((now, waited))
        if len(self._marks) == _MOST_MARKS:
            del self._marks[1::2]
            self._pause *= 2
        self.next = now + self._pause

    def seconds(self) -> list[tuple[float, float]]:
        """Return the time since the first mark and the wait since then, at each."""
        start, before = self._marks[0]
        return [((now - start) / 1e9, (waited - before) / 1e9) for now, waited in self._marks]


class Usage:
    """The times of this rank. Only the main thread's count, and those of autograd's threads, in which it waits."""

    def __init__(self) -> None:
        self._waiting = self._data = self._loading = self._calls = 0
        """Nanoseconds, as all times here, and how many calls."""
        self.reduced = 0
        """Bytes of tensors that this rank has given to reductions; of gradients before compression."""
        self._start = self._taken = self.values()
        """What `values` was at the start, and when `take` was called last."""
        self._marks, self._recent = _Marks(self._start[0], 0), _Marks(self._start[0], 0)
        """Since the start, and since the last `take`."""
        self.last_report: Report | None = None
        """What `combined` has returned last."""
        self.end_measuring: Callable[[], None] | None = None
        """Ends `measure_loading`. None: the time for a batch of a DataLoader counts as computing."""

    def waited(self, record: Record, since: int) -> None:
        """The script has waited for a call, as in Observer."""
        if get_ident() == _MAIN or _is_of_the_script():
            begin = max(record.called, since)
            # There is none of `join`, which waits for the others' calls.
            agreed = record.agreed or record.ended
            self._waiting += max(0, agreed - begin)
            self._data += max(0, record.ended - max(agreed, begin))
            self._calls += 1
            self._mark(record.ended)

    def waited_for_data(self, since: int) -> None:
        """The script has waited for gradients, as in Observer."""
        if _is_of_the_script():
            now = time.time_ns()
            self._data += now - since
            self._mark(now)

    def _mark(self, now: int) -> None:
        for marks in (self._marks, self._recent):
            if now >= marks.next:
                marks.add(now, self._waiting + self._data)

    def measure_loading(self) -> None:
        """From now on, count how long DataLoaders take for the next batch."""
        from torch.utils.data import dataloader

        if self.end_measuring is not None:
            return
        former = dataloader._BaseDataLoaderIter.__next__

        @functools.wraps(former)
        def timed(iterator: Any) -> Any:
            since, busy = time.time_ns(), self._waiting + self._data
            try:
                return former(iterator)
            finally:
                if _is_of_the_script():
                    self._loading += time.time_ns() - since - (self._waiting + self._data - busy)

        def end() -> None:
            if dataloader._BaseDataLoaderIter.__next__ is timed:  # else another library has wrapped it since
                dataloader._BaseDataLoaderIter.__next__ = former  # type: ignore[method-assign]

        dataloader._BaseDataLoaderIter.__next__ = timed  # type: ignore[assignment, method-assign]
        self.end_measuring = end

    def take(self, rank: int, size: int) -> Report:
        """Return the shares of the time since the last `take`, which add up to 1."""
        before, self._taken = self._taken, self.values()
        marks, self._recent = self._recent.seconds(), _Marks(self._taken[0], self._waiting + self._data)
        return {**shares(before, self._taken, rank, size), "marks": marks}

    def total(self, rank: int, size: int) -> Report:
        """Return the shares of the time since the start."""
        return {**shares(self._start, self.values(), rank, size), "marks": self._marks.seconds()}

    def values(self) -> Sequence[int]:
        """Return the time and all sums until then."""
        return time.time_ns(), self._waiting, self._data, self._loading, self._calls, self.reduced


def _is_of_the_script() -> bool:
    """Return whether the main thread runs this or waits for it: threads of autograd, in C++, run backward on GPUs."""
    thread = threading.current_thread()
    return thread is threading.main_thread() or isinstance(thread, threading._DummyThread)


@functools.lru_cache(1024)
def reduced_bytes(arguments: Sequence[tuple[str, Any]]) -> int:
    """Return how many bytes this rank gives to a call with these arguments; 0 if it reduces nothing."""
    given = dict(arguments)
    parts = zip(given["shapes"], given["dtypes"], strict=True) if "shapes" in given else ()
    return sum(math.prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in parts)
