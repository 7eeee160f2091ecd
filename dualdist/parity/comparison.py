"""Compares the records of two trainings: the first value that differs by more than rounding, and why. No torch here.

Weights, batches and settings are no sums: a difference of theirs is never rounding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .causes import CERTAIN, Cause, because, cause, facts
from .records import Difference, Pair, Record, hashes, is_finite

_AFTER = ("weights after the step", "buffers after the step", "weights before the forward")
_FRESH, _GROWTH = 4, 30
"""Rounding is at first this many times what another order of a sum changes, and grows by less than the second from
value to value. The second is a choice: a layer or step multiplies by less."""


@dataclass(frozen=True)
class Comparison:
    """What `compare` has found.

    first: the first difference that is no rounding. least: the first in any bit. largest: the size of the largest that
    is rounding. begin: the first step that both have. losses: of each step, the mean of both over passes and ranks.
    sizes: of each step, the largest difference of a weight after it.
    """

    first: Difference | None
    cause: Cause | None
    least: Difference | None
    largest: float
    notes: Sequence[str]
    begin: int
    losses: Sequence[Sequence[float | None]]
    sizes: Sequence[float]


def compare(left: Record, right: Record, tolerance: float, start: int | None = None) -> Comparison:
    """Compare two records. Values that depend on the number of processes are left out if these numbers differ.

    tolerance: larger rounding has a cause, which says so. start: the step with which the right, a resumed run, begins;
    None: after the step of the other side whose weights a side begins with.
    """
    pair = Pair(left, right, start)
    rounding, harmless = _Rounding(pair), set[Any]()
    first = least = why = None
    sizes = [0.0] * len(pair.losses)
    for found in pair.differences():
        here = facts(pair, found, harmless) if first is None else {}
        if not found.size:
            harmless.update((found.stage, kind, *values) for kind, values in here.items())
            continue
        least = least or found
        if rounding.is_loud_weight(found) and found.step - pair.begin < len(sizes):
            sizes[found.step - pair.begin] = max(sizes[found.step - pair.begin], found.size)
        if first is None and not rounding.explains(found, not here.keys().isdisjoint(CERTAIN)):
            first, why = found, cause(pair, found, harmless)
    if first is None and rounding.largest > tolerance:
        why = because("rounding-jump" if rounding.has_jumped else "rounding")
    notes = list(_notes(pair, first, least))
    return Comparison(first, why, least, rounding.largest, notes, pair.begin, pair.losses, sizes)


class _Rounding:
    """Says whether rounding explains a difference, if it explains those before it."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        errors = [rank["summing_error"] for ranks in pair.heads for rank in ranks]
        self._fresh = _FRESH * max(2**-24, *errors)
        dtypes = str([values for *_, values in pair.of(0, "layers")])
        self._low = 2**-8 if "bfloat16" in dtypes else 2**-11 if "float16" in dtypes else 0.0
        """Rounding of a number of 16 bits, if layers compute with such."""
        self._loud: set[str] = set()
        """The parameters whose gradient was more than rounding in any step: Adam moves others at random."""
        for *_, values in (*pair.of(0, "reduced gradient"), *pair.of(1, "reduced gradient")):
            least = (self._fresh + self._low) * max((value[1] for value in values.values()), default=0.0)
            self._loud.update(name for name, value in values.items() if not value[1] <= least)
        self.largest = self._level = self._gradients = 0.0
        """The largest rounding of all that matters; of outputs, losses and gradients without jumps; of gradients."""
        self.has_jumped = False
        self._first: dict[int, Difference] = {}
        """Of each rank, where it differs first in any bit."""

    def is_loud_weight(self, found: Difference) -> bool:
        return found.stage == "weights after the step" and found.name in self._loud

    def explains(self, found: Difference, is_certain: bool) -> bool:
        """Return whether rounding explains a difference. is_certain: something else does."""
        is_first = self._first.setdefault(found.rank, found).key == found.key
        no_sum = found.stage in ("initial weights", "initial buffers", "batch", "settings of the optimizer")
        if no_sum or math.isinf(found.size) or is_certain:
            return False
        is_after, is_weight = found.stage in _AFTER, self.is_loud_weight(found)
        grown = _GROWTH * max(self._level, self._gradients * (found.stage == "state of the optimizer"))
        # In numbers of 16 bits, few are rounded to another one, by much.
        limit = max(self._fresh, grown, math.sqrt(grown * self._low))
        # Adam makes full steps also of gradients that are rounding: the outputs do not depend on these.
        is_small = found.size <= self._fresh or not is_first if is_after else found.size <= limit
        if not is_small and not (found.stage in ("own gradient", "reduced gradient") and self._jumps(found)):
            return False
        is_result = is_small and not is_after and found.stage != "state of the optimizer"
        if is_result or (is_weight and self.has_jumped):
            self._level = max(self._level, found.size)
        self._gradients = max(self._gradients, found.size * (found.stage == "reduced gradient"))
        self.largest = max(self.largest, found.size * (is_weight or not is_after))
        return True

    def _jumps(self, found: Difference) -> bool:
        """Return whether rounding has changed the sign of enough numbers to change a gradient by so much."""
        changed = total = 0.0
        for rank, key, values in self._pair.of(0, "branches", found.step):
            others = self._pair.sides[1][rank].get(key, {}) if self._pair.same_size else {}
            for name, value in values.items() if others else ():
                count = math.prod(map(int, re.findall(r"\d+", value[3].partition("[")[2])))
                total += count
                other: Any = others.get(name, value)
                changed += min(count, math.dist(value[2], other[2]) ** 2)
        jumps = found.size**2 <= min(0.1, 100 * changed / max(total, 1))
        self.has_jumped |= jumps
        return jumps


# Notes: what a reader of the result should know.


def _notes(pair: Pair, first: Difference | None, least: Difference | None) -> Iterator[str]:
    if not pair.same_size:
        text = "processes: compared are only the mean loss, and rank 0's weights, reduced gradients and settings."
        yield f"{pair.sizes[0]} and {pair.sizes[1]} {text}"
    if pair.begin:
        yield f"One side begins with step {pair.begin} of the other, from which on they are compared."
    left, right = (ranks[0] for ranks in pair.heads)
    for name in ("threads", "torch", "device") if least else ():
        if left[name] != right[name]:
            text = f"Left has {name} {left[name]} and right {right[name]}"
            yield f"{text}, which can change the order of sums."
    for stages, text in (
        (("loss", "own gradient"), "losses or gradients are infinite or NaN"),
        (("initial weights",), "the ranks begin with different weights"),
        (("weights after the step",), "the ranks train different weights"),
    ):
        steps = [list(_odd_steps(pair, side, stages)) for side in (0, 1)]
        if all(steps):
            yield f"On both sides, {text} (first in step {max(0, min(map(min, steps)))})."
    yield from _note_on_generators(pair) if first else ()
    yield from _note_on_collectives(pair) if pair.same_size else ()


def _odd_steps(pair: Pair, side: int, stages: Sequence[str]) -> Iterator[int]:
    """Yield the steps with losses and gradients that are not finite, or with weights that are not those of rank 0."""
    for stage in stages:
        for _, key, values in pair.of(side, stage):
            is_equal = hashes(values) == hashes(pair.sides[side][0].get(key, {}))
            if not (is_finite(values) if stage in ("loss", "own gradient") else is_equal):
                yield key[0]


def _note_on_generators(pair: Pair) -> Iterator[str]:
    names: dict[bool, set[str]] = {False: set(), True: set()}
    for rank, key, states in pair.of(0, "random states"):
        others = pair.sides[1][rank].get(key, {}) if rank < pair.sizes[1] else {}
        for name in states.keys() & others.keys():
            (one, is_used), (other, is_used_there) = states[name], others[name]
            names[is_used or is_used_there].update([name] * (one != other))
    if unused := sorted(names[False] - names[True]):
        yield f"The random generators of {' and '.join(unused)} differ, but no forward uses them."


def _note_on_collectives(pair: Pair) -> Iterator[str]:
    calls = {(key[0], rank, key[2]) for side in (0, 1) for rank, key, _ in pair.of(side, "collective")}
    for step, rank, number in sorted(calls):
        left, right = (side[rank].get((step, "collective", number), {"": "none"})[""] for side in pair.sides)
        if left != right and step >= pair.begin - (pair.begin == 0):
            text = f"differ first in step {step}, rank {rank}, call {number}"
            yield f"The script's collectives {text}: {left} on the left, {right} on the right."
            return
