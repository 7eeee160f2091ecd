"""The options that all comparisons share, and their results: a table, JSON, and a chart."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rounds import Rounds, ratio

__all__ = ("Comparison", "parser", "write")

_PACKAGES = (
    "torch",
    "torchvision",
    "horovod",
    "mpi4py",
    "accelerate",
    "pytorch-ignite",
    "lightning",
    "numpy",
)


@dataclass(frozen=True)
class Comparison:
    """What was measured, and with what it is compared."""

    rounds: Rounds
    baseline: str
    """The contestant by which the others are divided."""
    figures: Sequence[str]
    processes: int


def parser(
    purpose: str | None, contestants: Iterable[str], rounds: int = 7, baseline: str = "DDP"
) -> argparse.ArgumentParser:
    """Return a parser with the options of all comparisons. rounds, baseline: the defaults."""
    names = list(contestants)
    options = argparse.ArgumentParser(
        description=purpose, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    options.add_argument(
        "-np", "--processes", type=int, default=2, metavar="N", help="of each contestant (2)"
    )
    options.add_argument(
        "--rounds", type=int, default=rounds, metavar="N", help="of each contestant (%(default)s)"
    )
    options.add_argument(
        "--contestants",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help=f"of: {', '.join(names)}",
    )
    options.add_argument("--baseline", choices=names, default=baseline, metavar="NAME", help="(%(default)s)")
    options.add_argument(
        "--json", type=Path, metavar="FILE", help="write all figures, with machine and versions"
    )
    options.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the ratios; needs matplotlib")
    return options


def write(comparison: Comparison, json_file: Path | None, plot_file: Path | None) -> None:
    """Print the table, and write the files that are not None. Raises SystemExit without the baseline's figures."""
    measured = comparison.rounds.figures
    sys.stdout.write("\n".join(_lines(comparison)) + "\n")
    if json_file is not None:
        json_file.write_text(json.dumps(_report(comparison), indent=2) + "\n")
    if comparison.baseline not in measured:
        raise SystemExit(f"The baseline {comparison.baseline} was not measured, so there are no ratios.")
    if plot_file is not None:
        from chart import draw

        draw(_ratios(comparison), comparison.baseline, plot_file)


def _lines(comparison: Comparison) -> Iterable[str]:
    ratios = _ratios(comparison)
    for figure in comparison.figures:
        yield f"{figure}, {comparison.processes} processes"
        for name, rounds in comparison.rounds.figures.items():
            shown = f"{statistics.median(row[figure] for row in rounds):10.2f}"
            if name in ratios:
                median, least, greatest = ratios[name][figure].values()
                shown += f"   {median:.2f} ({least:.2f}-{greatest:.2f}) x {comparison.baseline}"
            yield f"  {name:32}{shown}"
    for name, why in comparison.rounds.left_out.items():
        yield f"left out: {name}: {why}"


def _ratios(comparison: Comparison) -> dict[str, dict[str, dict[str, float]]]:
    """Return contestant -> figure -> median, least and greatest ratio to the baseline."""
    measured = comparison.rounds.figures
    theirs = measured.get(comparison.baseline)
    if theirs is None:
        return {}
    return {
        name: {figure: asdict(ratio(ours, theirs, figure)) for figure in comparison.figures}
        for name, ours in measured.items()
        if name != comparison.baseline
    }


def _report(comparison: Comparison) -> dict[str, Any]:
    return {
        "machine": {
            "processor": platform.machine(),
            "system": platform.platform(),
            "cpus": len(os.sched_getaffinity(0)),
        },
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "processes": comparison.processes,
        "baseline": comparison.baseline,
        "rounds": comparison.rounds.figures,
        "ratios": _ratios(comparison),
        "left_out": comparison.rounds.left_out,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
