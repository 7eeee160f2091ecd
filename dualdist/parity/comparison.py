"""Compares the records of two trainings: the first value that differs by more than rounding, and why. No torch here.

The values are compared in the order in which they follow from each other: initial weights, then in each step batch,
output, loss, own gradients, reduced gradients, settings and state of the optimizer, weights, buffers. So the first that
differs is nearest to the cause. A cause is named only if what was recorded excludes the others; else the result says
what is excluded. Weights, batches and settings are no sums: a difference of theirs is never rounding.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

Record = dict[str, Any]
"""A cell, the number of `steps` to record, and the list `ranks` of what recorder.py has written for each rank.
Its list `values` has entries [step, stage, number, {name: value}]; a value is a fingerprint or a setting."""
Key = tuple[int, str, int]
"""Step (-1 before the first), stage, and the how-manieth forward or backward of the step."""

WEIGHTS, BUFFERS, BATCH, OUTPUT = "initial weights", "initial buffers", "batch", "output of the model"
TARGETS, LOSS, OWN, OUTSIDE = "targets", "loss", "own gradient", "weights before the forward"
REDUCED, SETTINGS, STATE = "reduced gradient", "settings of the optimizer", "state of the optimizer"
NEW_WEIGHTS, NEW_BUFFERS = "weights after the step", "buffers after the step"
_IN_STEP = (REDUCED, SETTINGS, STATE, NEW_WEIGHTS, NEW_BUFFERS)
_PLACES = {stage: place for place, stage in enumerate(_IN_STEP, 1)}
_AFTER = (NEW_WEIGHTS, NEW_BUFFERS, OUTSIDE)
_COMPARED = (WEIGHTS, BUFFERS, OUTSIDE, BATCH, OUTPUT, TARGETS, LOSS, OWN, *_IN_STEP)
_EVERYWHERE = (WEIGHTS, REDUCED, SETTINGS, NEW_WEIGHTS)
"""What is comparable between different numbers of processes, beside the mean loss."""
EARLY, SAMPLES, LAYERS, RANDOM = "weights before an early step", "samples", "layers", "random states"
OPERATIONS, BRANCHES, COLLECTIVE = "operations", "branches", "collective"
"""These are no results, but show why results differ. EARLY: before a step without a backward. LAYERS: recorded when
they change. RANDOM: of each generator its state, and whether the forward has changed it. OPERATIONS: the name and
numbers of each, from the loss back, with one without a name before those of the model. BRANCHES: signs and indices on
which gradients depend."""

WIDTH = 16
"""Numbers in a sketch."""
_SETTING = 1e-9  # settings that differ by less are equal: they are numbers of Python
_FLOOR = 0.05
"""A tensor counts as this part of the largest of its kind, or more: what should be zero, such as the gradient of a bias
before a batch norm, is rounding."""
_WIRE = 2e-2
"""More than sending in bfloat16 changes. Each of its roundings changes a number by 2**-9 at most: this is ten such."""
_FRESH, _GROWTH = 4, 30
"""Rounding is at first this many times what another order of a sum changes, and grows by less than the second from
value to value. The second is a choice: a layer or step multiplies by less."""
_LINEAR = 3e-5
"""What is further from a sum of multiples of the ranks' gradients, relative to it, is not one."""


@dataclass(frozen=True)
class Difference:
    """A value that differs. `size` is relative to the value's norm; infinite where no norm can be compared."""

    step: int
    stage: str
    number: int
    rank: int
    name: str
    size: float


@dataclass(frozen=True)
class Cause:
    """Why two trainings differ, in a sentence, and what to do. kind: a short name for programs."""

    kind: str
    text: str
    remedy: str


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
    pair = _Pair(left, right, start)
    losses = pair.losses()
    first = least = cause = None
    sizes = [0.0] * len(losses)
    for found in pair.differences(losses):
        least = least or found
        is_weight = found.stage == NEW_WEIGHTS and found.name in pair.loud
        if is_weight and found.step - pair.begin < len(sizes):
            sizes[found.step - pair.begin] = max(sizes[found.step - pair.begin], found.size)
        if first is None and not pair.is_rounding(found):
            first, cause = found, pair.cause(found)
    if first is None and pair.largest > tolerance:
        cause = _because("rounding-jump" if pair.has_jumped else "rounding")
    return Comparison(
        first, cause, least, pair.largest, list(pair.notes(first, least)), pair.begin, losses, sizes
    )


def difference(left: Any, right: Any, floor: float = 0.0) -> float:
    """Return the size of the difference of two values, relative to the larger one, or to `floor` if that is larger."""
    if _bits(left) == _bits(right) or (left != left and right != right):
        return 0.0
    size = math.inf
    if isinstance(left, list) and isinstance(right, list):
        # Tokens have no distance, nor have other dtypes or shapes. The least is that of the sign of zero.
        if left[3] == right[3] and ("float" in left[3] or "complex" in left[3]):
            size = max(math.dist(left[2], right[2]) / (max(left[1], right[1], floor) or 1.0), 2**-60)
    elif all(isinstance(value, int | float) for value in (left, right)):
        size = abs(left - right) / max(abs(left), abs(right))
    return size if math.isfinite(size) else math.inf


class _Pair:
    """Two records, in the order left, right. A pair of values is a list in this order."""

    def __init__(self, left: Record, right: Record, start: int | None) -> None:
        self.heads = [left["ranks"], right["ranks"]]
        sides = [[_entries(rank["values"]) for rank in ranks] for ranks in self.heads]
        self.sizes = [len(side) for side in sides]
        self.same_size = self.sizes[0] == self.sizes[1]
        shifts = _starts(sides) if start is None else [0, start]
        self.begin = max(shifts)
        end = min(left["steps"] + shifts[0], right["steps"] + shifts[1])
        self.sides = [
            [_shifted(rank, shift, self.begin, end) for rank in side]
            for side, shift in zip(sides, shifts, strict=True)
        ]
        errors = [rank["summing_error"] for ranks in self.heads for rank in ranks]
        self.fresh = _FRESH * max(2**-24, *errors)
        dtypes = str([values for key, values in self.sides[0][0].items() if key[1] == LAYERS])
        self.low = 2**-8 if "bfloat16" in dtypes else 2**-11 if "float16" in dtypes else 0.0
        """Rounding of a number of 16 bits, if layers compute with such."""
        self.loud = {
            name for side in self.sides for rank in side for name in _loud(rank, self.fresh + self.low)
        }
        """The parameters whose gradient was more than rounding in any step: Adam moves others at random."""
        self.largest = self.level = self.gradients = 0.0
        """The largest rounding of all that matters; of outputs, losses and gradients without jumps; of gradients."""
        self.has_jumped = False
        self.first_keys: dict[int, Key] = {}
        """Of each rank, where it differs first in any bit."""
        self.harmless: set[tuple[str, Cause]] = set()
        """What may be a cause, and the stage on which it had no effect."""

    def at(self, found: Difference, stage: str, rank: int | None = None) -> list[Any]:
        """Return the values of a stage, in the step and pass of a difference."""
        key, rank = (found.step, stage, found.number), found.rank if rank is None else rank
        return [side[min(rank, len(side) - 1)].get(key, {}) for side in self.sides]

    def differences(self, losses: Sequence[Sequence[float | None]]) -> Iterator[Difference]:
        """Yield what differs in any bit, in the order of the module's docstring."""
        known = dict.fromkeys(key for side in self.sides for rank in side for key in rank)
        keys = [key for key in known if key[0] >= self.begin and key[1] in _COMPARED]
        # Stable: in a step as recorded, but all passes of both sides first.
        keys.sort(key=lambda key: (key[0], key[1] != OUTSIDE, _PLACES.get(key[1], 0)))
        for key in [(self.begin - 1, WEIGHTS, 0), (self.begin - 1, BUFFERS, 0), *keys]:
            step = key[0] - self.begin
            if not self.same_size and key[1:] == (LOSS, 0) and step < len(losses):
                size = difference(losses[step][0], losses[step][1])
                yield from [Difference(*key, 0, "", size)] * (size > 0)
            for rank in range(self.sizes[0] if self.same_size else int(key[1] in _EVERYWHERE)):
                left, right = (side[rank].get(key) for side in self.sides)
                found = [Difference(*key, rank, "", math.inf)] * bool(left or right)
                if left is not None and right is not None:
                    found = [one for one in _of_values(key, rank, left, right) if one.size]
                if not found:
                    equal = Difference(*key, rank, "", 0.0)
                    self.harmless.update((key[1], fact) for fact in self.facts(equal))
                yield from found

    def is_rounding(self, found: Difference) -> bool:
        """Return whether rounding explains the difference, if it explains those before it."""
        key = found.step, found.stage, found.number
        is_first = self.first_keys.setdefault(found.rank, key) == key
        is_certain = any(fact.kind in _CERTAIN for fact in self.facts(found))
        if found.stage in (WEIGHTS, BUFFERS, BATCH, SETTINGS) or math.isinf(found.size) or is_certain:
            return False
        grown = _GROWTH * (self.level if found.stage != STATE else max(self.level, self.gradients))
        # In numbers of 16 bits, few are rounded to another one, by much.
        limit = max(self.fresh, grown, math.sqrt(grown * self.low))
        is_weight = found.stage == NEW_WEIGHTS and found.name in self.loud
        if found.stage in _AFTER:
            # Adam makes full steps also of gradients that are rounding: the outputs do not depend on these.
            is_rounding, is_level = found.size <= self.fresh or not is_first, is_weight and self.has_jumped
        else:
            is_rounding, is_level = found.size <= limit or self.jumps(found), found.stage != STATE
            is_level &= found.size <= limit
        if is_rounding:
            self.level = max(self.level, found.size * is_level)
            self.gradients = max(self.gradients, found.size * (found.stage == REDUCED))
            self.largest = max(self.largest, found.size * (is_weight or found.stage not in _AFTER))
        return is_rounding

    def jumps(self, found: Difference) -> bool:
        """Return whether rounding has changed the sign of enough numbers to change a gradient by so much."""
        changed = total = 0.0
        for left, right in zip(*self.sides, strict=False):
            for key in [key for key in left if key[:2] == (found.step, BRANCHES) and key in right]:
                for name, value in left[key].items():
                    count = math.prod(map(int, re.findall(r"\d+", value[3].partition("[")[2])))
                    total += count
                    changed += min(count, math.dist(value[2], right[key].get(name, value)[2]) ** 2)
        jumps = found.stage in (OWN, REDUCED) and found.size**2 <= min(0.1, 100 * changed / max(total, 1))
        self.has_jumped |= jumps
        return jumps

    def losses(self) -> list[list[float | None]]:
        """Return for each step that both made the mean loss of both."""
        ends = [max((key[0] for key in side[0] if key[1] == NEW_WEIGHTS), default=-1) for side in self.sides]
        found: list[list[float | None]] = []
        for step in range(self.begin, min(ends) + 1):
            entries = [
                [rank[key][""] for rank in side for key in rank if key[:2] == (step, LOSS)]
                for side in self.sides
            ]
            known = [[loss for loss in own if loss is not None] for own in entries]
            found.append([sum(losses) / len(losses) if losses else None for losses in known])
        return found

    # Notes: what a reader of the result should know.

    def notes(self, first: Difference | None, least: Difference | None) -> Iterator[str]:
        if not self.same_size:
            text = "processes: compared are only the mean loss, and rank 0's weights, reduced gradients and settings."
            yield f"{self.sizes[0]} and {self.sizes[1]} {text}"
        if self.begin:
            yield f"One side begins with step {self.begin} of the other, from which on they are compared."
        left, right = (ranks[0] for ranks in self.heads)
        for name in ("threads", "torch", "device") if least else ():
            if left[name] != right[name]:
                text = f"Left has {name} {left[name]} and right {right[name]}"
                yield f"{text}, which can change the order of sums."
        for stages, text in (
            ((LOSS, OWN), "losses or gradients are infinite or NaN"),
            ((WEIGHTS,), "the ranks begin with different weights"),
            ((NEW_WEIGHTS,), "the ranks train different weights"),
        ):
            steps = [
                [key[0] for rank in side for key in rank if key[1] in stages and _is_odd(rank, side[0], key)]
                for side in self.sides
            ]
            if all(steps):
                yield f"On both sides, {text} (first in step {max(0, min(map(min, steps)))})."
        yield from self.of_generators() if first else ()
        yield from self.of_collectives()

    def of_generators(self) -> Iterator[str]:
        names: dict[bool, set[str]] = {False: set(), True: set()}
        for left, right in zip(*self.sides, strict=False):
            for key in [key for key in left if key[1] == RANDOM and key in right]:
                for name in left[key].keys() & right[key].keys():
                    (one, is_used), (other, is_used_there) = left[key][name], right[key][name]
                    names[is_used or is_used_there].update([name] * (one != other))
        if unused := sorted(names[False] - names[True]):
            yield f"The random generators of {' and '.join(unused)} differ, but no forward uses them."

    def of_collectives(self) -> Iterator[str]:
        ranks = enumerate(zip(*self.sides, strict=True)) if self.same_size else ()
        calls = [
            (key, rank, pair) for rank, pair in ranks for key in pair[0] | pair[1] if key[1] == COLLECTIVE
        ]
        for key, rank, pair in sorted(calls, key=lambda call: (call[0][0], call[1], call[0][2])):
            left, right = (made.get(key, {"": "none"})[""] for made in pair)
            if left != right and key[0] >= self.begin - (self.begin == 0):
                text = f"differ first in step {key[0]}, rank {rank}, call {key[2]}"
                yield f"The script's collectives {text}: {left} on the left, {right} on the right."
                return

    # What was recorded that may explain a difference.

    def facts(self, found: Difference) -> list[Cause]:
        """Return what differs in the layers and operations with which a value was computed."""
        if found.stage not in (OUTPUT, LOSS, OWN, NEW_BUFFERS) or not self.same_size:
            return []
        facts = [*self.of_layers(found)] if found.stage != LOSS or not any(self.at(found, OUTPUT)) else []
        if found.stage != NEW_BUFFERS:
            facts += self.of_random(found)
            if not any(fact.kind in _CERTAIN for fact in facts):  # else these follow
                facts += self.of_operations(found)
        facts = [fact for fact in facts if (found.stage, fact) not in self.harmless]
        return [fact for fact in facts if fact.kind in _CERTAIN] or facts

    def of_layers(self, found: Difference) -> Iterator[Cause]:
        left, right = self.at(found, LAYERS)
        if self.heads[0][0]["torch"] != self.heads[1][0]["torch"]:  # releases show other arguments
            left, right = (
                {name: re.sub(r"\(.*\)", "", side[name]) for name in side} for side in (left, right)
            )
        names = [name for name in left | right if left.get(name) != right.get(name)]
        # Of another class, a layer may compute the same.
        same_class = [name for name in names if _class(left.get(name)) == _class(right.get(name))]
        for name in (same_class or names)[:1]:
            kind = "layer" if same_class else "class"
            values = [side.get(name, "missing") for side in (left, right)]
            yield _because(kind, name=f"layer {name}" if name else "model", left=values[0], right=values[1])

    def of_random(self, found: Difference) -> Iterator[Cause]:
        left, right = self.at(found, RANDOM)
        pairs = [(name, left[name], right[name]) for name in left if name in right]
        names = [name for name, one, other in pairs if one[0] != other[0] and (one[1] or other[1])]
        if names:
            yield _because("random-numbers", names=" and ".join(names))

    def of_operations(self, found: Difference) -> Iterator[Cause]:
        left, right = (_part(values.get("", ()), found.stage) for values in self.at(found, OPERATIONS))
        for end in (0, -1):
            while left and right and _same_operation(left[end], right[end]):
                del left[end], right[end]
        if left or right:
            same_name = bool(left and right) and left[0][0] == right[0][0]
            own, other = (_shown(side[: 1 if same_name else 4]) for side in (left, right))
            yield _because("operation" if same_name else "operations", left=own, right=other)

    def agreeing(self, first: Difference) -> int | None:
        """Return the only side on which all ranks have the same value where the difference is; None if both or none."""
        key = first.step, first.stage, first.number
        values = [[_bits(rank.get(key, {}).get(first.name)) for rank in side] for side in self.sides]
        agree = [all(value == own[0] for value in own) for own in values]
        return agree.index(True) if agree[0] != agree[1] else None

    def cause(self, first: Difference) -> Cause:
        """Return the only cause that explains the first difference, or what is excluded."""
        explain = _EXPLAIN.get(first.stage, _Pair.of_numbers)
        initial = first.stage in (WEIGHTS, BUFFERS)
        causes = [*dict.fromkeys([*([] if initial else self.of_passes(first))] or explain(self, first))]
        if len(causes) == 1:
            return causes[0]
        if causes:
            return _because("several", causes=" Or: ".join(cause.text for cause in causes))
        before = _COMPARED[: _COMPARED.index(first.stage)]
        equal = [stage for stage in before if any(self.at(first, stage)) or stage == WEIGHTS]
        equal += ["layers", "operations", "random generators"] * (first.stage in (OUTPUT, LOSS, OWN))
        left = _LEFT.get(first.stage, "nothing that is known")
        return _because("unknown", equal=", ".join(equal), left=left)

    # Each yields causes that explain the first difference.

    def of_passes(self, first: Difference) -> Iterator[Cause]:
        sides = [side[min(first.rank, len(side) - 1)] for side in self.sides]
        passes = [Counter(key[0] for key in side if key[1] == LOSS) for side in sides]
        left, right = (own[first.step] for own in passes)
        if not left or not right:
            yield _because("number-of-steps", step=first.step)
        elif left != right and self.same_size:
            is_once = any(passes[0][step] == passes[1][step] for step in passes[0])
            steps = "this step, but not in all" if is_once else "each step"
            if not is_once or not all(self.at(first, first.stage)):  # else a result differs first
                yield _because("number-of-passes", left=left, right=right, steps=steps)

    def of_weights(self, first: Difference) -> Iterator[Cause]:
        pair = self.at(first, WEIGHTS)
        kinds = [_kind(side.get(first.name)) for side in pair]
        early = [_hashes(side) for side in self.at(first, EARLY)]
        explains = [bool(early[side]) and early[side] == _hashes(pair[1 - side]) for side in (0, 1)]
        if kinds[0] != kinds[1]:
            yield _because("parameters", name=first.name, left=kinds[0], right=kinds[1])
        elif any(explains):
            yield _because("early-step", side=explains[1])
        else:
            yield from [_because("early-step", side=bool(early[1]))] * (bool(early[0]) != bool(early[1]))
            yield from self.of_buffers(first)

    def of_buffers(self, first: Difference) -> Iterator[Cause]:
        agreeing = self.agreeing(first)
        kind = "no-broadcast" if first.stage == WEIGHTS else "no-broadcast-of-buffers"
        if agreeing is not None:
            yield _because(kind, side=1 - agreeing)
        if agreeing is None or not first.rank:
            yield _because("initial-values")

    def of_batch(self, first: Difference) -> Iterator[Cause]:
        pair = [values.get(first.name) for values in self.at(first, BATCH)]
        kinds, finite = [_kind(value) for value in pair], [_is_finite({"": value}) for value in pair]
        is_later = (first.step, first.number) > (self.begin, 0)
        agreeing = self.agreeing(first)
        seen = [self.seen(first, side, side) for side in (0, 1)]
        again = [first.step == self.begin and self.seen(first, 1 - side, side) == 2 for side in (0, 1)]
        in_step, in_all = (
            [Counter(self.samples(side, step)) for side in (0, 1)] for step in (first.step, None)
        )
        if finite[0] != finite[1]:
            yield _because("overflow", side=finite[0], rank=first.rank, what="the batch")
        elif kinds[0] != kinds[1]:
            since = ", and was of the same size before: one side ends an epoch" * is_later
            yield _because("batch-size", left=kinds[0], right=kinds[1], since=since)
        elif agreeing is not None:
            yield _because("no-sampler", side=agreeing)
        elif again[0] != again[1]:
            yield _because("sampler-state", side=again[1])
        elif in_step[0] == in_step[1] and in_step[0]:
            yield _because("division")
        elif bool(seen[0]) != bool(seen[1]):
            yield _because("epoch-end", side=bool(seen[1]))
        elif seen[0] != seen[1]:
            yield _because("set-epoch", side=seen[1] > seen[0])
        elif in_all[0].keys() & in_all[1].keys() and not is_later:
            yield _because("data-order")
        elif not in_all[0].keys() & in_all[1].keys() and all(in_all):
            # All data has been read if samples were read again.
            by = ", or these steps read another part of it" * (
                max([*in_all[0].values(), *in_all[1].values()]) == 1
            )
            yield _because("other-data", by=by)

    def seen(self, first: Difference, side: int, of: int) -> int:
        """Return whether a side has read samples of the batch of a side before (1), or this batch elsewhere (2)."""
        batch = self.at(first, SAMPLES)[of].get("", [])
        before = [sample for step in range(first.step) for sample in self.samples(side, step)]
        others = [key for key in self.sides[side][first.rank] if key[1] == SAMPLES and key[0] != first.step]
        keys = [key for key in others if of != side or key[0] < first.step]
        is_whole = any(self.sides[side][first.rank][key][""] == batch for key in keys)
        return 2 if is_whole else int(not set(before).isdisjoint(batch))

    def samples(self, side: int, step: int | None = None) -> Iterator[str]:
        """Yield hashes of the samples that the ranks of a side have read, in a step or in all."""
        for rank in self.sides[side]:
            for key, values in rank.items():
                if key[1] == SAMPLES and step in (None, key[0]):
                    yield from values[""]

    def of_numbers(self, first: Difference) -> Iterator[Cause]:
        finite = [
            all(_is_finite(self.at(first, stage)[side]) for stage in (OUTPUT, LOSS, OWN)) for side in (0, 1)
        ]
        factor = self.scale(first) if self.same_size else None
        if not self.same_size:
            in_step = [Counter(self.samples(side, first.step)) for side in (0, 1)]
            yield _because("rank-part" if in_step[0] == in_step[1] else "global-batch")
        elif first.stage == TARGETS:
            yield _because("targets", name=first.name)
        elif factor is not None:
            passes = sum(key[:2] == (first.step, LOSS) for key in self.sides[0][first.rank])
            by = f" by the number of passes, {passes}" * _is_factor(factor, passes)
            yield _because("scale", ratio=factor, by=by)
        elif facts := self.facts(first):
            yield from facts
        elif finite[0] != finite[1]:
            yield _because("overflow", side=finite[0], rank=first.rank, what="a loss or gradient")

    def scale(self, first: Difference) -> float | None:
        """Return by which factor all losses and gradients of the left are the right's, on each rank, or None."""
        factors = []
        for rank in range(self.sizes[0]):
            pair = self.at(first, OWN, rank=rank)
            left, right = (_sketch(side, pair[0]) for side in pair)
            square = float(right @ right)
            if first.stage == OUTPUT or not 0 < square < math.inf or not numpy.isfinite(left).all():
                return None
            factors.append(float(left @ right) / square)
            if numpy.linalg.norm(left - factors[-1] * right) > 1e-4 * numpy.linalg.norm(left):
                return None
            one, other = (side.get("") for side in self.at(first, LOSS, rank=rank))
            factors += [one / other] if one and other else []
        is_same = all(math.isclose(factor, factors[0], rel_tol=1e-4) for factor in factors)
        return factors[0] if is_same and not math.isclose(factors[0], 1, rel_tol=1e-4) else None

    def reduction(self, side: int, step: int, rank: int, names: Iterable[str] = ()) -> Any:
        """Return by which factors a rank's reduced gradients have those of each rank and pass, and those before.

        The factors are 1 in a mean over the ranks. Return also how much of them is neither, and their norm.
        """
        reduced, before = (self.sides[side][rank].get((each, REDUCED, 0), {}) for each in (step, step - 1))
        own = [values for made in self.sides[side] for key, values in made.items() if key[:2] == (step, OWN)]
        target, *columns = (_sketch(values, names or reduced) for values in (reduced, *own, before))
        if not own or not target.any() or not numpy.isfinite([target, *columns]).all():
            return numpy.zeros((1, 1)), 0.0, math.inf, 0.0
        matrix = numpy.stack(columns, 1)
        found = numpy.linalg.lstsq(matrix, target, rcond=1e-5)[0]
        rest = numpy.linalg.norm(matrix @ found - target) / numpy.linalg.norm(target)
        factors = found[:-1].reshape(len(self.sides[side]), -1) * len(self.sides[side])
        return factors, found[-1], rest, math.hypot(*(value[1] for value in reduced.values()))

    def made(self, side: int, first: Difference) -> str:
        """Return in words how the reduced gradients of a side were made of the ranks' own."""
        steps = sorted(key[0] for key in self.sides[side][0] if key[1] == REDUCED and key[0] >= self.begin)
        history = [self.reduction(side, step, first.rank) for step in steps]
        factors, kept, rest, norm = history[steps.index(first.step)]
        of_name, _, rest_of_name, _ = self.reduction(side, first.step, first.rank, [first.name])
        mean, of_all = factors.mean(), [made[0].mean() for made in history]
        clipped = [made[3] for made in history if made[0].mean() < 0.999]
        narrow = self.at(first, REDUCED)[side].get(first.name, [None])[-1]
        if self.agreeing(first) == 1 - side and abs(numpy.delete(of_name, first.rank, 0)).max(0).min() < 1e-2:
            after = [_hashes(rank.get((first.step, NEW_WEIGHTS, 0), {})) for rank in self.sides[side]]
            are_equal = all(weights == after[0] for weights in after)
            return (
                f"each rank's own of {first.name}: {'its step is' if are_equal else 'they are not'} reduced"
            )
        if math.isinf(rest):
            return "zero, infinite or NaN"
        if rest >= _LINEAR:
            alone = f"{of_name.mean():.4g} times the mean for {first.name}, but not for all"
            unlike = f"no sum of multiples of these: {rest:.1e} of them is something else"
            unlike = f"rounded to {narrow}" if narrow and first.size < _WIRE else unlike
            return alone if rest_of_name < _LINEAR and of_name.std() < 1e-2 else unlike
        if abs(kept) > 1e-2:
            return f"their mean, and {kept:.4g} times those of the step before"
        if not numpy.allclose(factors, mean, rtol=1e-2):
            shown = ", ".join(f"{round(float(abs(own).mean()), 3):g}" for own in factors)
            return f"a mean in which the ranks have the factors {shown}"
        if mean < 0.999 and len(clipped) > 1 and numpy.allclose(clipped, norm, rtol=1e-3):
            return f"their mean, clipped to the norm {norm:.4g}"
        names = {1: "their mean", len(factors): "their sum"}
        shown = next(
            (names[factor] for factor in names if math.isclose(mean, factor, rel_tol=1e-4)),
            f"{mean:.6g} times their mean",
        )
        return shown + " in each step" * (len(steps) > 1 and numpy.allclose(of_all, mean, rtol=1e-3))

    def of_reduction(self, first: Difference) -> Iterator[Cause]:
        left, right = (self.made(side, first) for side in (0, 1))
        if left != right:
            yield _because("reduction", left=left, right=right)

    def of_settings(self, first: Difference) -> Iterator[Cause]:
        left, right = (values.get(first.name) for values in self.at(first, SETTINGS))
        rates = [
            {key[0]: values.get(first.name) for key, values in side[0].items() if key[1] == SETTINGS}
            for side in self.sides
        ]
        by = ""
        if self.begin and first.step == self.begin and rates[0].get(0, rates[1].get(0)) in (left, right):
            by = ", as in step 0 on one side: it was not restored"
        elif first.name.startswith("lr of") and first.step > self.begin:
            by = ", after equal steps: compare how often the schedulers make a step"
        elif first.name.startswith("lr of") and left and right:
            pairs = [(rate, rates[1].get(step)) for step, rate in rates[0].items()]
            is_size = all(other and _is_factor(rate / other, *self.sizes) for rate, other in pairs)
            by = ": one side scales it by the number of processes" * is_size
        yield _because("settings", name=first.name, left=left, right=right, by=by)

    def of_state(self, first: Difference) -> Iterator[Cause]:
        early = [any(rank["early_steps"] for rank in ranks) for ranks in self.heads]
        is_early = early[0] != early[1] and first.step == self.begin
        kind = "early-step" if is_early else "optimizer-state"
        yield _because(kind, side=early[1], name=first.name or "state")

    def of_outside(self, first: Difference) -> Iterator[Cause]:
        left, right = (bool(values) for values in self.at(first, OUTSIDE))
        yield from [_because("outside", side=right)] * (left != right)

    def of_new_buffers(self, first: Difference) -> Iterator[Cause]:
        facts, side = self.facts(first), self.agreeing(first)
        if side is None and first.rank > 0 and first.name:
            # Rank 0's are equal: on one side it sent them before a forward, so that the others' are nearer to them.
            key = first.step, NEW_BUFFERS, 0
            values = [[ranks[rank][key][first.name][2] for rank in (0, first.rank)] for ranks in self.sides]
            side = int(math.dist(*values[1]) < math.dist(*values[0]))
        if facts:
            yield from facts
        elif side is not None:
            yield _because("no-broadcast-of-buffers", side=1 - side)


_EXPLAIN: Mapping[str, Callable[[_Pair, Difference], Iterator[Cause]]] = {
    WEIGHTS: _Pair.of_weights,
    BUFFERS: _Pair.of_buffers,
    BATCH: _Pair.of_batch,
    OUTSIDE: _Pair.of_outside,
    REDUCED: _Pair.of_reduction,
    SETTINGS: _Pair.of_settings,
    STATE: _Pair.of_state,
    NEW_BUFFERS: _Pair.of_new_buffers,
}
"""Stage of the first difference -> what may explain it. Of the others, `of_numbers`."""


def _entries(values: Sequence[Any]) -> dict[Key, dict[str, Any]]:
    """Return the values by their keys, with the layers at each output."""
    found: dict[Key, dict[str, Any]] = {}
    layers: dict[str, Any] = {}
    for step, stage, number, value in values:
        found[step, stage, number] = value
        layers = value if stage == LAYERS else layers
        if stage == OUTPUT:
            found[step, LAYERS, number] = layers
    return found


def _starts(sides: Sequence[Sequence[dict[Key, dict[str, Any]]]]) -> list[int]:
    """Return with which step of the whole training each side begins: a resumed one has weights of the other."""
    for own, other, place in ((sides[1][0], sides[0][0], 1), (sides[0][0], sides[1][0], 0)):
        initial = _hashes(own.get((-1, WEIGHTS, 0), {}))
        steps = [key[0] for key in other if key[1] == NEW_WEIGHTS and _hashes(other[key]) == initial]
        if initial and steps and initial != _hashes(other.get((-1, WEIGHTS, 0), {})):
            return [0, steps[0] + 1] if place else [steps[0] + 1, 0]
    return [0, 0]


def _shifted(
    entries: dict[Key, dict[str, Any]], shift: int, begin: int, end: int
) -> dict[Key, dict[str, Any]]:
    """Return the values before step `end` of the whole training, of which `begin` is the first to compare."""
    found = {(step + shift, stage, number): values for (step, stage, number), values in entries.items()}
    for initial, after in ((WEIGHTS, NEW_WEIGHTS), (BUFFERS, NEW_BUFFERS)):
        if (begin - 1, after, 0) in found:
            found[begin - 1, initial, 0] = found[begin - 1, after, 0]
    return {key: values for key, values in found.items() if key[0] < end}


def _loud(rank: dict[Key, dict[str, Any]], part: float) -> Iterator[str]:
    """Yield the parameters whose gradient was more than a part of the largest in a step."""
    for values in [values for key, values in rank.items() if key[1] == REDUCED]:
        least = part * max((value[1] for value in values.values()), default=0.0)
        yield from (name for name, value in values.items() if not value[1] <= least)


def _of_values(key: Key, rank: int, left: Any, right: Any) -> Iterator[Difference]:
    prints = [value for value in (*left.values(), *right.values()) if isinstance(value, list)]
    norms = [value[1] for value in prints if "float" in value[3] and math.isfinite(value[1])]
    floor = _FLOOR * max(norms, default=0.0)
    # Another loss may have no targets, and another release of torch no such setting.
    names = left.keys() & right.keys() if key[1] in (TARGETS, SETTINGS) else left | right
    for name in [name for name in left | right if name in names]:
        size = difference(left.get(name), right.get(name), floor)
        if key[1] in (SETTINGS, STATE) and not isinstance(left.get(name), list):
            size = math.inf if size > _SETTING else 0.0  # no rounding, however small
        yield Difference(*key, rank, name, size)


def _bits(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def _hashes(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _bits(value) for name, value in values.items()}


def _kind(value: Any) -> str:
    """Return dtype and shape of a fingerprint."""
    return value[3] if isinstance(value, list) else "missing"


def _class(layer: str | None) -> str | None:
    """Return the class of a layer, which is the same for SyncBatchNorm and the layers that it replaces."""
    return re.sub(r"Sync(?=BatchNorm)|\dd?$", "", layer.partition("(")[0]) if layer else layer


def _sketch(values: dict[str, Any], names: Any) -> Any:
    """Return the sketches of all tensors in one vector; those that are missing count as zero."""
    found = [values[name][2] if name in values else [0.0] * WIDTH for name in names]
    return numpy.array(found).reshape(-1)


def _is_odd(rank: dict[Key, Any], root: dict[Key, Any], key: Key) -> bool:
    """Return whether losses and gradients are not finite, or weights are not those of rank 0."""
    is_equal = _hashes(rank[key]) == _hashes(root.get(key, {}))
    return not (_is_finite(rank[key]) if key[1] in (LOSS, OWN) else is_equal)


def _is_finite(values: dict[str, Any]) -> bool:
    numbers = [value[1] if isinstance(value, list) else value for value in values.values()]
    return all(number is None or math.isfinite(number) for number in numbers)


def _is_factor(ratio: float, *numbers: int) -> bool:
    """Whether `ratio` is one of the numbers above 1 or its inverse, as far as rounding allows."""
    factors = [factor for number in numbers if number > 1 for factor in (number, 1 / number)]
    return any(math.isclose(ratio, factor, rel_tol=1e-4) for factor in factors)


def _part(operations: Sequence[Any], stage: str) -> list[Any]:
    """Return the operations of the model, those of the loss, or all of a gradient."""
    names = [name for name, _ in operations]
    place = names.index("") if "" in names else len(names) * (stage == LOSS)
    return list(
        operations[place:] if stage == OUTPUT else operations[:place] if stage == LOSS else operations
    )


def _same_operation(left: Any, right: Any) -> bool:
    pairs = [(left[1][name], right[1][name]) for name in left[1].keys() & right[1].keys()]
    same = [one == other or math.isclose(one, other, rel_tol=1e-5) for one, other in pairs]
    return left[0] == right[0] and all(same)


def _shown(operations: Sequence[Any]) -> str:
    """Return operations as text, the first one first."""
    shown = [
        f"{name}({', '.join(f'{key}={numbers[key]:g}' for key in numbers)})" for name, numbers in operations
    ]
    return ", ".join(shown[::-1]) or "nothing"


_LEFT = {
    OUTPUT: "data that the forward uses besides its arguments, or code without an operation that has a gradient",
    LOSS: "how the loss is made of the outputs: its function, targets and weights",
    OWN: "the backward: hooks on gradients, and where they stop",
    REDUCED: "what changes gradients between the backward and the step",
    BATCH: "how samples are drawn: lengths and seeds of epochs, random augmentation",
    NEW_WEIGHTS: "the code of the optimizer's step",
    NEW_BUFFERS: "what changes buffers besides the forward",
}
"""What may differ if nothing that is recorded does."""
_CERTAIN = ("layer", "random-numbers", "operation")
"""Facts that are no rounding, however small their effect is."""

_CAUSES = """
rounding: Only rounding: the differences are at first not larger than a reordered sum makes them, and grow slowly.
    Nothing is wrong. Compare fewer steps, or pass a larger --tolerance.
rounding-jump: Only rounding: it has changed the sign of single numbers, where ReLU or pooling take another branch.
    Nothing is wrong. Compare fewer steps, or pass a larger --tolerance.
unknown: Unknown. Excluded, because equal up to rounding: {equal}. What is left: {left}.
    Compare this part of the script on both sides, then the environments: variables and versions.
several: What was recorded does not tell apart: {causes}
    Make these equal one after the other.
early-step: On the {side}, the optimizer made a step before any backward, as Horovod's broadcast_optimizer_state does.
    Use dualdist's broadcast_optimizer_state, or broadcast the parameters after the optimizer's state.
parameters: The models differ: parameter {name} is {left} on the left and {right} on the right.
    Compare the code that makes the model: sizes, shared weights, and what the optimizer is given.
no-broadcast: On the {side}, the ranks begin with different weights: the parameters were not broadcast.
    Call broadcast_parameters(model.state_dict(), root_rank=0), or use DistributedDataParallel.
no-broadcast-of-buffers: On the {side}, the ranks have different buffers: they were not broadcast.
    Broadcast model.state_dict(), which has the buffers, or pass broadcast_buffers=True.
initial-values: The sides begin with other values: another seed, initialization, checkpoint or release of torch.
    Set the seed before the model is made, or load the same checkpoint.
batch-size: The batch is {left} on the left and {right} on the right{since}.
    Compare batch sizes, drop_last, the length of the data, and what prepares it.
set-epoch: The {side} repeats batches that it has seen, the other side does not: all its epochs have the same order.
    Call sampler.set_epoch(epoch) before each epoch.
no-sampler: On the {side}, all ranks read the same batch: the data is not divided among them.
    Give the DataLoader a DistributedSampler with the rank and the number of ranks.
division: In this step both sides read the same samples, but divide them in another way among ranks and passes.
    Give the sampler the same rank and number of ranks on both sides.
epoch-end: After equal batches, the {side} reads samples again, the other side does not: it begins an epoch.
    Compare drop_last, and the lengths of the data.
sampler-state: The {side} begins with a batch that the other side reads in another step: one of them has resumed.
    Restore the sampler's epoch and place with the weights. If the weights were not restored, pass --start-step.
data-order: Both sides read the same samples in another order: other seeds or kinds of samplers, or order of files.
    Give the sampler the same seed, rank and number of ranks on both sides.
other-data: Neither side reads a sample of the other: the data differs, or what prepares it{by}.
    Compare the data, what prepares it, random augmentation, and the seeds of samplers.
global-batch: The mean losses differ first, and the sides read other samples in this step.
    Divide the batch by the number of processes, and deal the samples in the same order.
rank-part: The mean losses of the same samples differ first: a layer or the loss depends on the part of the rank.
    Plain BatchNorm, dropout, and a loss that is no mean over the batch, differ with the number of processes.
overflow: On the {side}, {what} of rank {rank} is infinite or NaN.
    Look at this rank's batch; lower the learning rate or the loss scale, or clip the gradients.
targets: Batches and outputs are equal, but the targets of {name} differ.
    Compare what prepares the targets.
layer: The {name} is {left} on the left and {right} on the right.
    Give layers the same arguments, train() or eval(), autocast and requires_grad_() on both sides.
class: The {name} is {left} on the left and {right} on the right.
    Make the layers in the same way on both sides.
random-numbers: The random generator of {names}, which the forward uses, is in another state: dropout differs.
    Seed it in the same way on both sides, for example with seed_everything(seed, rank_offset=True).
operation: An operation of the forward or loss is {left} on the left and {right} on the right.
    Compare the loss function, its scale, and the code of the forward.
operations: The forward or loss computes {left} on the left, where the right computes {right}.
    Compare the loss function, its scale, and the code of the forward.
scale: The loss of the left is {ratio:.6g} times that of the right, and so are all gradients: it is scaled{by}.
    Compare the scale of the loss: GradScaler, weights, `reduction`, or a division by passes or samples.
number-of-passes: The left makes {left} backward passes in {steps}, and the right {right}.
    Accumulate over the same number of passes on both sides, and skip the same steps.
number-of-steps: After {step} steps one side ends: other lengths of the data, or a step that a GradScaler skipped.
    Compare drop_last, and the numbers of batches and epochs.
reduction: Of the ranks' own gradients, the reduced ones are {left} on the left, and {right} on the right.
    Compare what is reduced, op, compression, factors, clipping, zero_grad(), no_sync(), and hooks on gradients.
settings: {name} is {left} on the left and {right} on the right{by}.
    Set the same value on both sides.
optimizer-state: After equal steps, {name} of the optimizer differs: it was not broadcast, not restored, or changed.
    Broadcast or load the optimizer's state on both sides, or on none.
outside: On the {side}, the weights were changed between the steps, and not by the optimizer.
    Compare what changes weights: moving averages, limits, a checkpoint or a broadcast.
"""
"""Of each cause the kind, why, and in the next line what to do."""


def _because(kind: str, side: int = 0, **values: Any) -> Cause:
    text, remedy = _CAUSES.partition(f"\n{kind}: ")[2].splitlines()[:2]
    return Cause(kind, text.format(side=("left", "right")[side], **values), remedy.strip())
