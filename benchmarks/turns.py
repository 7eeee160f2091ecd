"""Calls functions in turns on all ranks, and prints the ratios of their times."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

import dualdist as hvd

__all__ = ("compare_in_turns",)


def compare_in_turns(functions: Mapping[str, Callable[[], object]], rounds: int) -> None:
    """Print rank 0's milliseconds per call, and the ratios of the last function to the others. Collective.

    functions: by name. The times include a barrier. A ratio is the median over the rounds, then the
    smallest and the greatest. One round more is the warm-up.
    """
    order, shuffler = list(functions), random.Random(0)  # the same on all ranks
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        shuffler.shuffle(order)
        for name in order:
            hvd.barrier()
            began = time.perf_counter()
            functions[name]()
            hvd.barrier()
            taken[name].append(1e3 * (time.perf_counter() - began))
    if hvd.rank() != 0:
        return
    for name in functions:
        print(f"{name}: {statistics.median(taken[name][1:]):.1f} ms")
    *others, last = functions
    for other in others:
        ratios = [taken[last][place] / taken[other][place] for place in range(1, rounds + 1)]
        print(f"{last} / {other}: {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
