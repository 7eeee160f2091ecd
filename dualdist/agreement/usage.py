"""How the ranks spend their time: loading data, computing, waiting for other ranks, communicating.

Backward takes equally long on all ranks when it ends with a collective, so a clock outside cannot find the slow rank. A
rank that agrees on a call knows when it has made the call, when the last member has, and when the data has arrived.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .call import Record

KINDS = ("computing", "data_loading", "waiting", "communication")
_MOST_DIFFERENCE = 0.05
"""Up to this difference between shares of time, no rank is called slow."""

logger = logging.getLogger("dualdist")

Report = dict[str, Any]


class Usage:
    """The times of this rank since `start`, or since the last `take`. Calls that run in the background take none."""

    def __init__(self) -> None:
        self._waiting = self._data = self._loading = 0
        """Nanoseconds, as all times here."""
        self._since = time.time_ns()
        self._calls = 0
        self._step: Any = None
        """The hook after each step of an optimizer; None until `measure_loading`."""
        self._forward: Any = None
        """The hook before the next forward. It removes itself, so that compiled models see no hooks."""
        self._step_end, self._busy_before = 0, 0

    def add(self, record: Record, since: int = 0) -> None:
        """Add a call for which a thread of the script has waited. since: when it began to wait, if not at once."""
        if record.agreed:
            begin = max(record.called, since)
            self._waiting += max(0, record.agreed - begin)
            self._data += max(0, record.ended - max(record.agreed, begin))
            self._calls += 1

    def add_data(self, since: int) -> None:
        """Add a wait for data, from `since` to now."""
        self._data += time.time_ns() - since

    def measure_loading(self, *, at_once: bool) -> None:
        """From now on, count the time between a step of an optimizer and the next forward, without collectives in it.

        Until then it belongs to the computing. at_once: whether it begins now, as after a step.
        """
        if self._step is None:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            self._step = register_optimizer_step_post_hook(self._end_step)
            if at_once:
                self._end_step()

    def stop(self) -> None:
        """Undo `measure_loading`."""
        for hook in (self._step, self._forward):
            if hook is not None:
                hook.remove()
        self._step = self._forward = None

    def _end_step(self, *_: object) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._step_end, self._busy_before = time.time_ns(), self._waiting + self._data
        if self._forward is None:
            self._forward = register_module_forward_pre_hook(self._begin_forward)

    def _begin_forward(self, *_: object) -> None:
        hook, self._forward = self._forward, None
        if hook is not None:  # else another thread was faster
            hook.remove()
            busy = self._waiting + self._data - self._busy_before
            self._loading += max(0, time.time_ns() - max(self._step_end, self._since) - busy)

    def take(self, rank: int) -> Report:
        """Return the shares of the time since the last `take`, which add up to 1, and start over."""
        now = time.time_ns()
        length = max(1, now - self._since)
        shares = {
            "data_loading": self._loading / length,
            "waiting": self._waiting / length,
            "communication": self._data / length,
        }
        shares["computing"] = max(0.0, 1.0 - sum(shares.values()))
        report = {"rank": rank, "seconds": length / 1e9, "calls": self._calls, **shares}
        self._waiting = self._data = self._loading = self._calls = 0
        self._busy_before = 0
        self._since = now
        return report


def combined(ranks: Sequence[Report]) -> Report:
    """Return the reports of all ranks, with the rank for which the others wait, and what it does meanwhile.

    A wait for data is communication only as far as every rank waits for data; the rest is waiting for a rank. The slow
    rank is the one that waits least, if its share of waiting is at least 5 % of the time below the mean of the others'.
    The reason is what takes more of its time than of the others', "computing" or "data_loading".
    """
    common = min(float(report["communication"]) for report in ranks)
    ranks = [
        {**row, "communication": common, "waiting": row["waiting"] + row["communication"] - common}
        for row in sorted(ranks, key=lambda row: int(row["rank"]))
    ]
    slowest = min(ranks, key=lambda report: float(report["waiting"]))
    others = [report for report in ranks if report is not slowest]
    found: Report = {"ranks": ranks, "slowest": None, "reason": None, "share": 0.0}
    if not others:
        return found
    more = {kind: slowest[kind] - statistics.fmean(report[kind] for report in others) for kind in KINDS}
    if -more["waiting"] >= _MOST_DIFFERENCE:
        reason = max(("computing", "data_loading"), key=lambda kind: more[kind])
        found |= {"slowest": slowest["rank"], "reason": reason, "share": -more["waiting"]}
    return found


def lines(report: Report) -> list[str]:
    """Return `report` as a table with a sentence below."""
    titles = ("rank", "seconds", "calls", *(kind.replace("_", " ") for kind in KINDS))
    rows = [
        (
            str(row["rank"]),
            f"{row['seconds']:.1f}",
            str(row["calls"]),
            *(f"{100 * row[kind]:.1f} %" for kind in KINDS),
        )
        for row in report["ranks"]
    ]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    table = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in (titles, *rows)
    ]
    if report["slowest"] is None:
        return [*table, "The ranks wait for each other equally long."]
    reason = str(report["reason"]).replace("_", " ")
    return [
        *table,
        f"The others wait for rank {report['slowest']} in {100 * report['share']:.0f} % of the time: "
        f"its {reason} takes longer than theirs.",
    ]


def write(report: Report, where: str) -> None:
    """Write this rank's report to the folder `where`, for `dualdist report`; with "1" as a line to stderr."""
    if where == "1":
        shares = ", ".join(f"{kind.replace('_', ' ')} {100 * report[kind]:.1f} %" for kind in KINDS)
        print(
            f"dualdist: rank {report['rank']}, {report['seconds']:.1f} s: {shares}",
            file=sys.stderr,
            flush=True,
        )
        return
    try:
        path = Path(where)
        path.mkdir(parents=True, exist_ok=True)
        (path / f"time-{report['rank']}.json").write_text(json.dumps(report) + "\n")
    except OSError as error:
        logger.warning("DUALDIST_SUMMARY must be 1 or a folder to write to, but is %r: %s.", where, error)
