"""The options that all comparisons share, and their results: a table, JSON, and a chart."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contestant import Contestant
from report_file import write_report
from rounds import Rounds, ratio, run_rounds

__all__ = ("compare", "parser")


@dataclass(frozen=True)
class _Comparison:
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
    options.add_argument("-np", "--processes", type=int, default=2, metavar="N", help="of each contestant (2)")
    options.add_argument("--rounds", type=int, default=rounds, metavar="N", help="of each contestant (%(default)s)")
    options.add_argument(
        "--contestants", nargs="+", choices=names, default=names, metavar="NAME", help=f"of: {', '.join(names)}"
    )
    options.add_argument("--baseline", choices=names, default=baseline, metavar="NAME", help="(%(default)s)")
    options.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write all figures, with machine and versions, after each round of a contestant",
    )
    options.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the ratios; needs matplotlib")
    return options


def compare(
    worker: str,
    contestants: Mapping[str, Contestant[Any]],
    arguments: Sequence[str],
    figures: Sequence[str],
    args: argparse.Namespace,
) -> Rounds:
    """Run the rounds (see run_rounds), print the table of `figures`, and write the files that `args` names.

    args: from `parser`. Ctrl-C and SIGTERM end the rounds early, and the table has those until then. Raises SystemExit
    after the table if rounds or the baseline's figures are missing.
    """

    def comparison(rounds: Rounds) -> _Comparison:
        return _Comparison(rounds, args.baseline, figures, args.processes)

    def save(rounds: Rounds) -> None:
        if args.json is not None:
            write_report(args.json, _figures(comparison(rounds)))

    rounds = run_rounds(worker, contestants, arguments, args.processes, args.rounds, save)
    save(rounds)
    sys.stdout.write("\n".join(_lines(comparison(rounds))) + "\n")
    ratios = _ratios(comparison(rounds))
    if args.plot is not None and ratios:
        from chart import draw

        draw(ratios, args.baseline, args.plot)
    if rounds.missing:
        raise SystemExit(f"{rounds.missing} of {args.rounds} rounds are not complete.")
    if args.baseline in rounds.left_out or args.baseline not in rounds.figures:
        raise SystemExit(f"The baseline {args.baseline} was not measured in all rounds.")
    return rounds


def _lines(comparison: _Comparison) -> Iterable[str]:
    ratios = _ratios(comparison)
    for figure in comparison.figures:
        yield f"{figure}, {comparison.processes} processes"
        for name, rounds in comparison.rounds.figures.items():
            if not rounds:
                continue
            shown = f"{statistics.median(row[figure] for row in rounds):10.2f}"
            if name in ratios:
                median, least, greatest = ratios[name][figure].values()
                shown += f"   {median:.2f} ({least:.2f}-{greatest:.2f}) x {comparison.baseline}"
            yield f"  {name:32}{shown}"
    for name, why in comparison.rounds.left_out.items():
        yield f"left out: {name}: {why}"


def _ratios(comparison: _Comparison) -> dict[str, dict[str, dict[str, float]]]:
    """Return contestant -> figure -> median, least and greatest ratio to the baseline."""
    measured = comparison.rounds.figures
    theirs = measured.get(comparison.baseline)
    if not theirs:
        return {}
    return {
        name: {figure: asdict(ratio(ours, theirs, figure)) for figure in comparison.figures}
        for name, ours in measured.items()
        if ours and name != comparison.baseline
    }


def _figures(comparison: _Comparison) -> dict[str, Any]:
    return {
        "processes": comparison.processes,
        "baseline": comparison.baseline,
        "rounds": comparison.rounds.figures,
        "ratios": _ratios(comparison),
        "left_out": comparison.rounds.left_out,
        "missing_rounds": comparison.rounds.missing,
    }
