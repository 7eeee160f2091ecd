"""The chart of a comparison: a group of bars for each figure, a bar for each contestant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

__all__ = ("draw",)

_BAR = 0.8
"""Width of a group of bars, where groups are 1 apart."""


def draw(ratios: Mapping[str, Mapping[str, Mapping[str, float]]], baseline: str, file: Path) -> None:
    """Draw `ratios` (contestant -> figure -> median, least, greatest) into `file`, whose suffix chooses the format."""
    figures = [figure for figure in next(iter(ratios.values())) if "CPU" not in figure]
    drawing = Figure(figsize=(1.5 + 1.6 * len(figures), 4.5), layout="constrained")
    axes = drawing.subplots()
    width = _BAR / len(ratios)
    for number, (name, found) in enumerate(ratios.items()):
        medians = [found[figure]["median"] for figure in figures]
        spread = [
            [found[figure]["median"] - found[figure]["least"] for figure in figures],
            [found[figure]["greatest"] - found[figure]["median"] for figure in figures],
        ]
        places = [group - _BAR / 2 + (number + 0.5) * width for group in range(len(figures))]
        axes.bar(places, medians, width, yerr=spread, label=name, error_kw={"linewidth": 0.6})
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(figures)), [figure.removesuffix(" ms") for figure in figures])
    axes.set_ylabel(f"time of a step / {baseline}'s")
    axes.legend(fontsize="x-small", ncols=2)
    drawing.savefig(file, dpi=120)
