"""What two trainings recorded, side by side, in the order in which the values follow from each other. No torch here.

The first value that differs is then the nearest to the cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]
"""A cell, the number of `steps` to record, and the list `ranks` of what recorder.py has written for each rank.
Its list `values` has entries [step, stage, number, {name: value}]; a value is a fingerprint or a setting."""
Values = dict[str, Any]
Key = tuple[int, str, int]
"""Step (-1 before the first), stage, and the how-manieth forward or backward of the step."""

_FIRST = "initial weights|initial buffers|weights before the forward|batch|output of the model|targets|loss"
_LAST = "reduced gradient|settings of the optimizer|state of the optimizer|weights after the step"
COMPARED = f"{_FIRST}|own gradient|{_LAST}|buffers after the step".split("|")
"""Stages of a training whose values are compared, in this order. Others are no results, but show why results differ:

weights before an early step: one without a backward.
samples: a hash of each of a batch.
layers: how each computes, besides its weights.
calls: of each layer what it was first given and has returned, in the order in which they end.
random states: of each generator its state, and whether the forward has changed it.
operations: the name and numbers of each, from the loss back, with one without a name before those of the model.
branches: signs and indices on which gradients depend.
collective: a call of the script.
"""
_PLACES = {stage: max(0, place - COMPARED.index("own gradient")) for place, stage in enumerate(COMPARED)}
_PLACES["weights before the forward"] = -1
"""The order in a step: of one place as recorded."""
EVERYWHERE = ("initial weights", "reduced gradient", "settings of the optimizer", "weights after the step")
"""What is comparable between different numbers of processes, beside the mean loss."""
WIDTH = 16
"""Numbers in a sketch."""
_SETTING = 1e-9  # settings that differ by less are equal: they are numbers of Python
_FLOOR = 0.05
"""A tensor counts as this part of the largest of its kind, or more: what should be zero, such as the gradient of a bias
before a batch norm, is rounding."""


@dataclass(frozen=True)
class Difference:
    """A value that differs. `size` is relative to the value's norm; infinite where no norm can be compared."""

    step: int
    stage: str
    number: int
    rank: int
    name: str
    size: float

    @property
    def key(self) -> Key:
        return self.step, self.stage, self.number


def difference(left: Any, right: Any, floor: float = 0.0) -> float:
    """Return the size of the difference of two values, relative to the larger one, or to `floor` if that is larger."""
    if bits(left) == bits(right) or (left != left and right != right):
        return 0.0
    size = math.inf
    if isinstance(left, list) and isinstance(right, list):
        # Tokens have no distance, nor have other dtypes or shapes. The least is that of the sign of zero.
        if left[3] == right[3] and ("float" in left[3] or "complex" in left[3]):
            size = max(math.dist(left[2], right[2]) / (max(left[1], right[1], floor) or 1.0), 2**-60)
    elif all(isinstance(value, int | float) for value in (left, right)):
        size = abs(left - right) / max(abs(left), abs(right))
    return size if math.isfinite(size) else math.inf


class Pair:
    """Two records, in the order left, right. A pair of values is a list in this order.

    start: the step with which the right, a resumed run, begins; None: found by the weights.
    """

    def __init__(self, left: Record, right: Record, start: int | None) -> None:
        self.heads = [left["ranks"], right["ranks"]]
        self.sizes = [len(ranks) for ranks in self.heads]
        self.same_size = self.sizes[0] == self.sizes[1]
        shifts = _starts([ranks[0]["values"] for ranks in self.heads]) if start is None else [0, start]
        self.begin = max(shifts)
        """The first step that both have."""
        end = min(left["steps"] + shifts[0], right["steps"] + shifts[1])
        self.sides = [
            [_shifted(rank["values"], shift, self.begin, end) for rank in ranks]
            for ranks, shift in zip(self.heads, shifts, strict=True)
        ]
        self.resumed = [shift > 0 for shift in shifts]
        """Whether each side is a resumed run. It gets the earlier steps of the other, whose training it continues."""
        for own, other in zip(*self.sides[:: -1 if shifts[0] else 1], strict=False):
            other |= {key: values for key, values in own.items() if key[0] in range(self.begin)} | other
        self.harmless: set[Any] = set()
        """What differs, with the stage of each value that it left equal so far: filled by `compare`."""
        made = [{key[0] for _, key, _ in self.of(side, "weights after the step")} for side in (0, 1)]
        steps = [step for step in sorted(made[0] & made[1]) if step >= self.begin]
        self.losses = [[self._loss(side, step) for side in (0, 1)] for step in steps]
        """For each step that both made, the mean loss over passes and ranks of both."""

    def of(self, side: int, stage: str, step: int | None = None) -> Iterator[tuple[int, Key, Values]]:
        """Yield rank, key and values of what a side has of a stage, in a step or in all."""
        for rank, entries in enumerate(self.sides[side]):
            for key, values in entries.items():
                if key[1] == stage and step in (None, key[0]):
                    yield rank, key, values

    def _loss(self, side: int, step: int) -> float | None:
        known = [values[""] for *_, values in self.of(side, "loss", step) if values[""] is not None]
        return sum(known) / len(known) if known else None

    def at(self, found: Difference, stage: str, rank: int | None = None) -> list[Values]:
        """Return the values of a stage on both sides, in the step and pass of a difference, on its or another rank."""
        key, rank = (found.step, stage, found.number), found.rank if rank is None else rank
        return [side[min(rank, len(side) - 1)].get(key, {}) for side in self.sides]

    def differences(self, stages: Sequence[str] = COMPARED) -> Iterator[Difference]:
        """Yield what differs in any bit, in the order of the module's docstring; where all is equal, a size of 0."""
        known = dict.fromkeys(key for side in self.sides for rank in side for key in rank)
        # These may belong before the first step; a forward there is part of no step.
        early = ("initial weights", "initial buffers", "" if self.begin else "collective")
        keys = [key for key in known if key[1] in stages and key[0] >= self.begin - (key[1] in early)]
        # Stable: in a step as recorded, but all passes of both sides first.
        for key in sorted(keys, key=lambda key: (key[0], _PLACES.get(key[1], 0))):
            step = key[0] - self.begin
            if not self.same_size and key[1:] == ("loss", 0) and step < len(self.losses):
                ours, theirs = self.losses[step]
                yield Difference(*key, 0, "", difference(ours, theirs))
            for rank in range(self.sizes[0] if self.same_size else int(key[1] in EVERYWHERE)):
                left, right = (side[rank].get(key) for side in self.sides)
                found = [Difference(*key, rank, "", math.inf)] * bool(left or right)
                if left is not None and right is not None:
                    found = [one for one in _of_values(key, rank, left, right) if one.size]
                yield from found or [Difference(*key, rank, "", 0.0)]


def _of_values(key: Key, rank: int, left: Values, right: Values) -> Iterator[Difference]:
    prints = [value for value in (*left.values(), *right.values()) if isinstance(value, list)]
    norms = [value[1] for value in prints if "float" in value[3] and math.isfinite(value[1])]
    floor = _FLOOR * max(norms, default=0.0)
    is_setting = key[1] in ("settings of the optimizer", "state of the optimizer")
    for name in left | right:
        # Another loss may have no targets, and another release of torch no such setting.
        if key[1] not in ("targets", "settings of the optimizer") or (name in left and name in right):
            size = difference(left.get(name), right.get(name), floor)
            if is_setting and not isinstance(left.get(name), list):
                size = math.inf if size > _SETTING else 0.0  # no rounding, however small
            yield Difference(*key, rank, name, size)


def _starts(sides: Sequence[Sequence[Any]]) -> list[int]:
    """Return with which step of the whole training each side begins: a resumed one has weights of the other."""
    made = [{(step, stage, number): values for step, stage, number, values in side} for side in sides]
    begins = []
    for one, other in (made, made[::-1]):
        initial = one[-1, "initial weights", 0]
        stages = ("initial weights", "weights after the step")
        weights = (key for key, values in other.items() if key[1] in stages and values == initial)
        # Of several, as after steps with a rate of 0, that from which on most is equal.
        first = [(key, values) for key, values in one.items() if key[0] == 0]
        same = {at + 1: sum(other.get((at + 1, *key[1:])) == values for key, values in first) for at, *_ in weights}
        begins.append(max(same, key=same.__getitem__, default=0))
    return [0, begins[1]] if begins[1] else [begins[0], 0]


def _shifted(entries: Sequence[Any], shift: int, begin: int, end: int) -> dict[Key, Values]:
    """Return the values before step `end` of the whole training, of which `begin` is the first to compare."""
    found = {(step + shift, stage, number): values for step, stage, number, values in entries}
    for what in ("weights", "buffers"):
        if (begin - 1, f"{what} after the step", 0) in found:
            found[begin - 1, f"initial {what}", 0] = found[begin - 1, f"{what} after the step", 0]
    return {key: values for key, values in found.items() if key[0] < end}


def bits(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def hashes(values: Values) -> Values:
    return {name: bits(value) for name, value in values.items()}


def is_finite(values: Values) -> bool:
    numbers = [value[1] if isinstance(value, list) else value for value in values.values()]
    return all(number is None or math.isfinite(number) for number in numbers)
