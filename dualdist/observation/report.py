"""Show how the ranks of a run spent their time, and for which rank the others waited.

dualdist report FOLDER

DUALDIST_SUMMARY=FOLDER lets each rank write a file time-N.json there when it leaves the world. A file with what
hvd.report() has returned, as JSON, can be passed as well.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import operator
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, logger

NUMBERS = ("rank", "size", "start", "seconds", "calls", "bytes_reduced")
KINDS = ("computing", "data_loading", "waiting", "communication")
_MOST_DIFFERENCE, _PARTS, _MOST_ERRORS = 0.05, 16, 4.0
"""Up to this difference between shares of time, no rank is called slow, nor if it is less than so many times the
standard error of the mean over so many parts of the time."""
Report = dict[str, Any]


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
    rank is the one that waits least, if its share of waiting is at least 5 % of the time below the mean of the others',
    and is so in all parts of the time, but for noise.
    The reason is what takes more of its time than of the others', "computing" or "data_loading".

    former: the report of the time just before, in which the same rank may have been slow already.
    """
    common = min(float(report["communication"]) for report in ranks)
    marks = {row["rank"]: row.get("marks") for row in ranks}
    ranks = [{name: row[name] for name in (*NUMBERS, *KINDS)} for row in sorted(ranks, key=operator.itemgetter("rank"))]
    for row in ranks:
        row |= {"communication": common, "waiting": row["waiting"] + row["communication"] - common}
    scalars = {f"rank_{row['rank']}_{kind}": row[kind] for row in ranks for kind in KINDS}
    found: Report = dict.fromkeys(("slowest", "reason", "since"))
    found |= {"ranks": ranks, "scalars": scalars, "share": 0.0}
    slowest = min(ranks, key=lambda report: float(report["waiting"]))
    others = [report for report in ranks if report is not slowest]
    if not others:
        return found
    more = {kind: slowest[kind] - sum(report[kind] for report in others) / len(others) for kind in KINDS}
    if -more["waiting"] >= _MOST_DIFFERENCE and not _is_noise(marks, slowest["rank"]):
        reason = max(("computing", "data_loading"), key=lambda kind: more[kind])
        found |= {"slowest": slowest["rank"], "reason": reason, "share": -more["waiting"]}
        found["since"] = former["since"] if former and former["slowest"] == slowest["rank"] else ranks[0]["start"]
    return found


def _is_noise(marks: dict[int, Any], slowest: int) -> bool:
    """Return whether a rank may have waited less than another one by chance, as parts of the time differ.

    marks: of each rank, moments, and how long it had waited by then; None: unknown.
    """
    if None in marks.values():
        return False
    start, end = (pick(each[place][0] for each in marks.values()) for pick, place in ((max, 0), (min, -1)))
    count = min(_PARTS, *(len(each) - 1 for each in marks.values()))
    times = [start + (end - start) * part / count for part in range(count + 1)] if count > 1 else []
    waits = {rank: [_waited(each, moment) for moment in times] for rank, each in marks.items()}
    own = waits.pop(slowest)
    for other in waits.values():
        ahead = list(map(operator.sub, other, own))
        parts = [after - before for before, after in itertools.pairwise(ahead)]
        if len(parts) < 2 or sum(parts) <= _MOST_ERRORS * statistics.stdev(parts) * len(parts) ** 0.5:
            return True
    return False


def _waited(marks: Sequence[Sequence[float]], moment: float) -> float:
    """Return how long a rank had waited by a moment between the first and the last mark."""
    place = min(max(1, bisect.bisect(marks, moment, key=operator.itemgetter(0))), len(marks) - 1)
    (before, least), (after, most) = marks[place - 1 : place + 1]
    return least + (most - least) * (moment - before) / max(1e-9, after - before)


def lines(report: Report) -> list[str]:
    """Return `report` as a table with a sentence below."""
    rows = [["rank", "seconds", "calls", "MB reduced", *(kind.replace("_", " ") for kind in KINDS)]]
    for row in report["ranks"]:
        numbers = f"{row['rank']} {row['seconds']:.1f} {row['calls']} {row['bytes_reduced'] / 1e6:.1f}".split()
        rows.append([*numbers, *(f"{100 * row[kind]:.1f} %" for kind in KINDS)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    if missing := sorted(set(range(report["ranks"][0]["size"])) - {row["rank"] for row in report["ranks"]}):
        return [*table, f"ranks {missing} have no file"]  # the slow one may be among them
    if len(report["ranks"]) == 1:
        return table
    if report["slowest"] is None:
        least, *others = sorted(row["waiting"] for row in report["ranks"])
        if (more := statistics.mean(others) - least) < _MOST_DIFFERENCE:
            return [*table, "No rank is slow: the ranks wait for each other equally long, but for chance."]
        text = f"the waits differ by {100 * more:.0f} % of the time, which may be chance, as parts of it differ as much"
        return [*table, f"No rank is named: {text}. A longer run, or an idle machine, shows more."]
    since, reason = time.localtime(report["since"]), str(report["reason"]).replace("_", " ")
    seconds = next(row["seconds"] for row in report["ranks"] if row["rank"] == report["slowest"])
    cost = f"{100 * report['share']:.0f} % of the time ({report['share'] * seconds:.1f} of {seconds:.1f} s)"
    slowest = f"rank {report['slowest']} since {time.strftime('%H:%M:%S', since)}"
    text = f"The others wait {cost} more than {slowest}: its {reason} takes"
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


# The command.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dualdist report`."""
    add = parser.add_argument
    add("paths", type=Path, nargs="+", metavar="FILE", help="files, or folders with time-N.json")
    add("--plot", type=Path, metavar="PNG", help="draw it; needs matplotlib")


def execute(args: argparse.Namespace) -> int:
    """Print the table, and return 0. Raises ConfigurationError if a file cannot be read."""
    files: list[Report] = []
    for path in args.paths:
        found = sorted(path.glob("time-*.json")) if path.is_dir() else [path]
        if not found:
            raise ConfigurationError(f"FILE must be a folder with files time-N.json, but {path} has none.")
        files += map(_read, found)
    rows = [row for file in files for row in file["ranks"]]
    ranks = [row["rank"] for row in rows]
    if len({row["size"] for row in rows}) > 1 or len(set(ranks)) < len(ranks):
        raise ConfigurationError(
            f"FILE must be of one run, but ranks {sorted(ranks)} are of several. Remove the files of older runs."
        )
    report = files[0] if "slowest" in files[0] else combined(rows)
    sys.stdout.writelines(f"{line}\n" for line in lines(report))
    if args.plot is not None:
        save_figure(_draw(report["ranks"]), args.plot)
    return 0


def _read(path: Path) -> Report:
    """Return what hvd.report() has returned, or a dictionary of only "ranks" with what one rank has written."""
    try:
        found = json.loads(path.read_text())
        found = found if "ranks" in found else {"ranks": [found]}
        if not found["ranks"]:
            raise ValueError("no ranks")
        for row in found["ranks"]:
            _ = [float(row[name]) for name in (*NUMBERS, *KINDS)]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"FILE must be what a rank or hvd.report() has written, but {path} is not: {error!r}."
        ) from None
    return dict(found)


def new_figure(width: float, height: float) -> Any:
    """Return a figure for `--plot`, in inches. Raises ConfigurationError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError("`--plot` needs matplotlib. Install it: pip install matplotlib.") from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write the file of `--plot`. Raises ConfigurationError if it cannot be written."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        text = f"`--plot` must be a file that can be written, but {path} is not: {error}."
        raise ConfigurationError(text) from None


def _draw(rows: Sequence[dict[str, Any]]) -> Any:
    figure = new_figure(6, 1.5 + 0.3 * len(rows))
    axes, names, left = figure.add_subplot(), [f"rank {row['rank']}" for row in rows], [0.0] * len(rows)
    for kind in KINDS:
        shares = [100 * row[kind] for row in rows]
        axes.barh(names, shares, left=left, label=kind.replace("_", " "))
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("% of the time")
    figure.legend(loc="outside upper center", ncols=len(KINDS), frameon=False)
    return figure
