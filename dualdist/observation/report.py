"""Show how the ranks of a run spent their time, and for which rank the others waited.

dualdist report FOLDER

DUALDIST_SUMMARY=FOLDER lets each rank write a file time-N.json there when it leaves the world. A file with what
hvd.report() has returned, as JSON, can be passed as well.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from .usage import KINDS, NUMBERS, combined, lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dualdist report`."""
    add = parser.add_argument
    add("paths", type=Path, nargs="+", metavar="FILE", help="files, or folders with time-N.json")
    add("--plot", type=Path, metavar="PNG", help="draw it; needs matplotlib")


def execute(args: argparse.Namespace) -> int:
    """Print the table, and return 0. Raises ConfigurationError if a file cannot be read."""
    rows = [row for path in args.paths for file in _files(path) for row in _read(file)]
    ranks = [row["rank"] for row in rows]
    if len({row["size"] for row in rows}) > 1 or len(set(ranks)) < len(ranks):
        raise ConfigurationError(
            f"FILE must be of one run, but ranks {sorted(ranks)} are of several. Remove the files of older runs."
        )
    report = combined(rows)
    sys.stdout.writelines(f"{line}\n" for line in lines(report))
    if args.plot is not None:
        save_figure(_draw(report["ranks"]), args.plot)
    return 0


def _files(path: Path) -> Sequence[Path]:
    files = sorted(path.glob("time-*.json")) if path.is_dir() else [path]
    if not files:
        raise ConfigurationError(f"FILE must be a folder with files time-N.json, but {path} has none.")
    return files


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_text())
        rows = found["ranks"] if "ranks" in found else [found]
        if not rows:
            raise ValueError("no ranks")
        for row in rows:
            _ = [float(row[name]) for name in (*NUMBERS, *KINDS)]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"FILE must be what a rank or hvd.report() has written, but {path} is not: {error!r}."
        ) from None
    return list(rows)


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
