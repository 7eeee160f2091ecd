"""Slurm's short forms of lists of numbers and of host names."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

__all__ = ("host_names", "node_counts")

_PART = re.compile(r"\[([^\]]*)\]|([^\[]+)")


def node_counts(text: str) -> list[int] | None:
    """Return a number for each node from a list such as 4(x2),3, which is 4, 4, 3. None for any other form."""
    counts: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def host_names(text: str) -> list[str]:
    """Return the names in a list such as node[07-08,20],gpu1, which is node07, node08, node20, gpu1."""
    entries = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text)
    return [name for entry in entries for name in _expanded(entry)]


def _expanded(entry: str) -> Iterator[str]:
    parts = [
        [number for item in ranges.split(",") for number in _range(item)] if ranges else [text]
        for ranges, text in _PART.findall(entry)
    ]
    return map("".join, itertools.product(*parts))


def _range(item: str) -> list[str]:
    first, _, last = item.partition("-")
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
