"""How the ranks spend their time: computing, loading data, waiting for other ranks, communicating.

Backward takes equally long on all ranks when it ends with a collective, so a clock outside cannot find the slow rank. A
rank that agrees on a call knows when it has made the call, when the last member has, and when the data has arrived.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import operator
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import get_ident
from typing import Any

from ..core.agreement.call import Record
from ..errors import logger

NUMBERS = ("rank", "size", "start", "seconds", "calls", "bytes_reduced")
KINDS = ("computing", "data_loading", "waiting", "communication")
_MOST_DIFFERENCE = 0.05
"""Up to this difference between shares of time, no rank is called slow."""

_MAIN = threading.main_thread().ident
"""Lets the hot path know the main thread without a call of Python."""


Report = dict[str, Any]


class Usage:
    """The times of this rank. Only the main thread's count, and those of autograd's threads, in which it waits."""

    def __init__(self) -> None:
        self._waiting = self._data = self._loading = self._calls = 0
        """Nanoseconds, as all times here, and how many calls."""
        self.reduced = 0
        """Bytes of tensors that this rank has given to reductions; of gradients before compression."""
        self._start = self._taken = self.values()
        """What `values` was at the start, and when `take` was called last."""
        self.last_report: Report | None = None
        """What `combined` has returned last."""

    def add(self, record: Record, since: int = 0) -> None:
        """Add a call for which the script has waited. since: when it began to wait, if not at once."""
        if get_ident() == _MAIN or _is_of_the_script():
            begin = max(record.called, since)
            # There is none of `join`, which waits for the others' calls.
            agreed = record.agreed or record.ended
            self._waiting += max(0, agreed - begin)
            self._data += max(0, record.ended - max(agreed, begin))
            self._calls += 1

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time in the `with` block as a wait for data."""
        since = time.time_ns()
        try:
            yield
        finally:
            if _is_of_the_script():
                self._data += time.time_ns() - since

    def measure_loading(self) -> Callable[[], None]:
        """From now on, count how long DataLoaders take for the next batch. Returns the function that ends this."""
        from torch.utils.data import dataloader

        former = dataloader._BaseDataLoaderIter.__next__

        @functools.wraps(former)
        def timed(iterator: Any) -> Any:
            since, busy = time.time_ns(), self._waiting + self._data
            try:
                return former(iterator)
            finally:
                if _is_of_the_script():
                    self._loading += time.time_ns() - since - (self._waiting + self._data - busy)

        dataloader._BaseDataLoaderIter.__next__ = timed  # type: ignore[assignment, method-assign]
        return functools.partial(setattr, dataloader._BaseDataLoaderIter, "__next__", former)

    def take(self, rank: int, size: int) -> Report:
        """Return the shares of the time since the last `take`, which add up to 1."""
        before, self._taken = self._taken, self.values()
        return shares(before, self._taken, rank, size)

    def total(self, rank: int, size: int) -> Report:
        """Return the shares of the time since the start."""
        return shares(self._start, self.values(), rank, size)

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
    import torch  # not for `dualdist report`

    given = dict(arguments)
    parts = zip(given["shapes"], given["dtypes"], strict=True) if "shapes" in given else ()
    return sum(math.prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in parts)


def shares(before: Sequence[int], after: Sequence[int], rank: int, size: int) -> Report:
    """Return what a rank has done between two of its `Usage.values`, as shares of the time."""
    length, waiting, data, loading, calls, reduced = map(operator.sub, after, before)
    times = {"data_loading": loading, "waiting": waiting, "communication": data}
    found = {kind: times.get(kind, 0) / max(1, length) for kind in KINDS}
    found["computing"] = max(0.0, 1.0 - sum(found.values()))
    numbers = (rank, size, before[0] / 1e9, length / 1e9, calls, reduced)
    return {**dict(zip(NUMBERS, numbers, strict=True)), **found}


def combined(ranks: Sequence[Report], former: Report | None = None) -> Report:
    """Return the reports of all ranks, with the rank for which the others wait, and what it does meanwhile.

    A wait for data is communication only as far as every rank waits for data; the rest is waiting for a rank. The slow
    rank is the one that waits least, if its share of waiting is at least 5 % of the time below the mean of the others'.
    The reason is what takes more of its time than of the others', "computing" or "data_loading".

    former: the report of the time just before, in which the same rank may have been slow already.
    """
    common = min(float(report["communication"]) for report in ranks)
    waits = {"communication": common}
    ranks = [{**row, **waits, "waiting": row["waiting"] + row["communication"] - common} for row in ranks]
    ranks = sorted(ranks, key=operator.itemgetter("rank"))
    scalars = {f"rank_{row['rank']}_{kind}": row[kind] for row in ranks for kind in KINDS}
    found: Report = dict.fromkeys(("slowest", "reason", "since"))
    found |= {"ranks": ranks, "scalars": scalars, "share": 0.0}
    slowest = min(ranks, key=lambda report: float(report["waiting"]))
    others = [report for report in ranks if report is not slowest]
    if not others:
        return found
    more = {kind: slowest[kind] - sum(report[kind] for report in others) / len(others) for kind in KINDS}
    if -more["waiting"] >= _MOST_DIFFERENCE:
        reason = max(("computing", "data_loading"), key=lambda kind: more[kind])
        found |= {"slowest": slowest["rank"], "reason": reason, "share": -more["waiting"]}
        is_same = former is not None and former["slowest"] == slowest["rank"]
        found["since"] = former["since"] if former and is_same else ranks[0]["start"]
    return found


def lines(report: Report) -> list[str]:
    """Return `report` as a table with a sentence below."""
    rows = [["rank", "seconds", "calls", "MB reduced", *(kind.replace("_", " ") for kind in KINDS)]]
    for row in report["ranks"]:
        numbers = (
            f"{row['rank']} {row['seconds']:.1f} {row['calls']} {row['bytes_reduced'] / 1e6:.1f}".split()
        )
        rows.append([*numbers, *(f"{100 * row[kind]:.1f} %" for kind in KINDS)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    if missing := sorted(set(range(report["ranks"][0]["size"])) - {row["rank"] for row in report["ranks"]}):
        return [*table, f"ranks {missing} have no file"]  # the slow one may be among them
    if len(report["ranks"]) == 1:
        return table
    if report["slowest"] is None:
        return [*table, "The ranks wait for each other equally long."]
    since, reason = time.localtime(report["since"]), str(report["reason"]).replace("_", " ")
    slowest = f"rank {report['slowest']} since {time.strftime('%H:%M:%S', since)}"
    text = (
        f"The others wait {100 * report['share']:.0f} % of the time more than {slowest}: its {reason} takes"
    )
    return [*table, f"{text} longer than theirs."]


def write(report: Report, where: str) -> None:
    """Write this rank's report to the folder `where`, for `dualdist report`; with "1" as a line to stderr."""
    try:
        if where == "1":
            shares = ", ".join(f"{kind.replace('_', ' ')} {100 * report[kind]:.1f} %" for kind in KINDS)
            sys.stderr.write(f"dualdist: rank {report['rank']}, {report['seconds']:.1f} s: {shares}\n")
        else:
            path = Path(where)
            path.mkdir(parents=True, exist_ok=True)
            (path / f"time-{report['rank']}.json").write_text(json.dumps(report) + "\n")
    except (OSError, ValueError) as error:  # ValueError: stderr is closed
        logger.warning("DUALDIST_SUMMARY must be 1 or a folder to write to, but is %r: %s.", where, error)
