"""Compares the records of two trainings: the first value that differs, and why. Pure: no processes, no torch.

The values are compared in the order in which they follow from each other: initial weights, then in each step batch,
loss, own gradients, reduced gradients, settings of the optimizer, weights, buffers. So the first that differs is
nearest to the cause, to which lead the values before it, those of the other ranks, and what else is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]
"""A cell, the number of `steps` to record, and the list `ranks` of what recorder.py has written for each rank.
Its list `values` has entries [step, stage, number, {name: value}]; a value is a fingerprint or a setting."""
Key = tuple[int, str, int]
"""Step (-1 before the first), stage, and the how-manieth forward or backward of the step."""

WEIGHTS, BUFFERS, BATCH, RANDOM = "initial weights", "initial buffers", "batch", "random states"
LOSS, OWN, REDUCED, SETTINGS = "loss", "own gradient", "reduced gradient", "settings of the optimizer"
COLLECTIVE, NEW_WEIGHTS, NEW_BUFFERS = "collective", "weights after the step", "buffers after the step"
_EVERYWHERE = (WEIGHTS, REDUCED, SETTINGS, NEW_WEIGHTS)
"""What is comparable between different numbers of processes, beside the mean loss."""
_COMPARED = (WEIGHTS, BUFFERS, BATCH, LOSS, OWN, REDUCED, SETTINGS, NEW_WEIGHTS, NEW_BUFFERS)
_OF_LAYERS = ("torch", "cuda")  # the random generators that dropout uses
_SETTING = 1e-9  # settings that differ by less are equal: they are numbers of Python
_FLOOR = 0.05
"""A tensor counts as this part of the largest of its kind, or more: what should be zero, such as the gradient of a bias
before a batch norm, is rounding. Up to 5e-6 of the largest, it stays below the usual tolerance of 1e-4."""
_WIRE = 2e-2
"""More than sending in bfloat16 changes. Each of its roundings changes a number by 2**-9 at most: this is ten such."""
_ROUNDING, _GROWTH = 1e-5, 30
"""Differences that begin below the first, and grow by less than the second from value to value, are of rounding. The
first is that of a sum of 30,000 float32 numbers in another order: 2**-24 times the root of their number. The second is
a choice: a fault is a hundred times larger than rounding when it first shows, and a layer or step multiplies less."""


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

    first: the first difference above the tolerance. least: the first in any bit. largest: the size of the largest
    before `first`. losses: of each step, the mean of both over passes and ranks. sizes: of each step, the largest
    difference of a weight after it.
    """

    first: Difference | None
    cause: Cause | None
    least: Difference | None
    largest: float
    notes: Sequence[str]
    losses: Sequence[Sequence[float | None]]
    sizes: Sequence[float]


def compare(left: Record, right: Record, tolerance: float) -> Comparison:
    """Compare two records. Values that depend on the number of processes are left out if these numbers differ."""
    pair = _Pair(left, right)
    losses = pair.losses()
    first = least = cause = None
    largest, sizes = 0.0, [0.0] * len(losses)
    for found in filter(lambda found: found.size, pair.differences(losses)):
        least = least or found
        if found.stage == NEW_WEIGHTS and found.step < len(sizes):
            sizes[found.step] = max(sizes[found.step], found.size)
        if first is None and found.size > tolerance:
            first = found
        elif first is None:
            largest = max(largest, found.size)
    if first is not None and least is not None:
        is_rounding = least.size < _ROUNDING and first.size < _GROWTH * largest
        is_jump = first.stage in (OWN, REDUCED) and 0 < largest < _ROUNDING and first.size < _WIRE
        other = "optimizer-state" if first.stage == NEW_WEIGHTS else "rounding-jump" if is_jump else "unknown"
        causes = [_because("rounding")] if is_rounding else pair.causes(first)
        cause = next(iter(causes), _because(other, stage=first.stage))
    return Comparison(first, cause, least, largest, list(pair.notes(least)), losses, sizes)


def difference(left: Any, right: Any, floor: float = 0.0) -> float:
    """Return the size of the difference of two values, relative to the larger one, or to `floor` if that is larger."""
    if _bits(left) == _bits(right) or (left != left and right != right):
        return 0.0
    size = math.inf
    if isinstance(left, list) and isinstance(right, list):
        # Tokens have no distance. The least is that of another dtype, or sign of zero.
        if all("float" in value[3] or "complex" in value[3] for value in (left, right)):
            norm = max(left[1], right[1], floor) or 1.0
            size = max(math.dist(left[2], right[2]) / norm, 2**-60)
    elif all(isinstance(value, int | float) for value in (left, right)):
        size = abs(left - right) / max(abs(left), abs(right))
    return size if math.isfinite(size) else math.inf


class _Pair:
    """Two records, in the order left, right. A pair of values is a list in this order."""

    def __init__(self, left: Record, right: Record) -> None:
        self.heads = [left["ranks"], right["ranks"]]
        steps = min(left["steps"], right["steps"])
        self.sides: list[list[dict[Key, dict[str, Any]]]] = [
            [{tuple(key): found for *key, found in rank["values"] if key[0] < steps} for rank in ranks]
            for ranks in self.heads
        ]
        self.sizes = [len(side) for side in self.sides]
        self.same_size = self.sizes[0] == self.sizes[1]

    def differences(self, losses: Sequence[Sequence[float | None]]) -> Iterator[Difference]:
        """Yield what is compared, in the order of the module's docstring."""
        ranks = [rank for side in self.sides for rank in side]
        keys = dict.fromkeys(key for rank in ranks for key in rank if key[1] in _COMPARED)
        after = (REDUCED, SETTINGS, NEW_WEIGHTS, NEW_BUFFERS)
        # Stable: in a step as recorded, but all passes of both sides first.
        for key in sorted(keys, key=lambda key: (key[0], key[1] in after)):
            step, stage, number = key
            if not self.same_size and stage == LOSS and number == 0 and step < len(losses):
                yield Difference(*key, 0, "", difference(losses[step][0], losses[step][1]))
            for rank in range(self.sizes[0] if self.same_size else int(stage in _EVERYWHERE)):
                pair = [side[rank].get(key) for side in self.sides]
                if all(values is not None for values in pair):
                    yield from self._of_values(key, rank, *pair)
                elif any(pair):
                    yield Difference(*key, rank, "", math.inf)

    def _of_values(self, key: Key, rank: int, left: Any, right: Any) -> Iterator[Difference]:
        prints = [value for value in (*left.values(), *right.values()) if isinstance(value, list)]
        norms = [value[1] for value in prints if "float" in value[3] and math.isfinite(value[1])]
        floor = _FLOOR * max(norms, default=0.0)
        for name in left | right:
            size = difference(left.get(name), right.get(name), floor)
            if key[1] == SETTINGS:
                size = math.inf if size > _SETTING else 0.0  # no rounding, however small
            yield Difference(*key, rank, name, size)

    def losses(self) -> list[list[float | None]]:
        """Return for each step that both made the mean loss of both."""
        counts = [len({key[0] for key in side[0] if key[1] == NEW_WEIGHTS}) for side in self.sides]
        found: list[list[float | None]] = []
        for step in range(min(counts)):
            entries = [
                [rank[key][""] for rank in side for key in rank if key[:2] == (step, LOSS)]
                for side in self.sides
            ]
            known = [[loss for loss in own if loss is not None] for own in entries]
            found.append([sum(losses) / len(losses) if losses else None for losses in known])
        return found

    def notes(self, least: Difference | None) -> Iterator[str]:
        """Yield what a reader of the result should know."""
        if not self.same_size:
            text = "processes: compared are only the mean loss, and rank 0's weights, reduced gradients and settings."
            yield f"{self.sizes[0]} and {self.sizes[1]} {text}"
        left, right = (ranks[0] for ranks in self.heads)
        for name in ("threads", "torch", "device") if least else ():
            if left[name] != right[name]:
                text = f"Left has {name} {left[name]} and right {right[name]}"
                yield f"{text}, which can change the order of sums."
        ranks = enumerate(zip(*self.sides, strict=True)) if self.same_size else ()
        calls = [
            (key, rank, pair) for rank, pair in ranks for key in pair[0] | pair[1] if key[1] == COLLECTIVE
        ]
        for key, rank, pair in sorted(calls, key=lambda call: (call[0][0], call[1], call[0][2])):
            left, right = (made.get(key, {"": "none"})[""] for made in pair)
            if left != right:
                text = f"differ first in step {key[0]}, rank {rank}, call {key[2]}"
                yield f"The script's collectives {text}: {left} on the left, {right} on the right."
                return

    def at(self, first: Difference, stage: str) -> list[dict[str, Any]]:
        """Return the values of a stage at the difference."""
        key = first.step, stage, first.number
        return [side[min(first.rank, len(side) - 1)].get(key, {}) for side in self.sides]

    def agreeing(self, first: Difference) -> int | None:
        """Return the only side on which all ranks have the same value where the difference is; None if both or none."""
        key = first.step, first.stage, first.number
        values = [[_bits(rank.get(key, {}).get(first.name)) for rank in side] for side in self.sides]
        agree = [all(value == own[0] for value in own) for own in values]
        return agree.index(True) if agree[0] != agree[1] else None

    def ratio(self, first: Difference) -> float | None:
        """Return by which factor the left value is the right one; None if it is no multiple."""
        values = [values.get(first.name) for values in self.at(first, first.stage)]
        left, right = ([value] if isinstance(value, float) else (value or [0, 0, []])[2] for value in values)
        square = math.fsum(value * value for value in right)
        if not left or not 0 < square < math.inf:
            return None
        factor = math.fsum(one * other for one, other in zip(left, right, strict=True)) / square
        # What is left is small, also beside the difference: of rounding, it is as large.
        rest = math.dist(left, [factor * value for value in right])
        is_multiple = rest <= min(1e-2 * math.hypot(*left), 0.1 * math.dist(left, right))
        return factor if factor > 0 and is_multiple else None

    def passes(self, first: Difference) -> list[int]:
        """Return the number of backward passes in the step."""
        sides = [side[min(first.rank, len(side) - 1)] for side in self.sides]
        return [sum(key[:2] == (first.step, LOSS) for key in side) for side in sides]

    # Each yields causes that explain the first difference, the most probable one first.

    def causes(self, first: Difference) -> Iterator[Cause]:
        stage, side = first.stage, self.agreeing(first)
        if stage in (WEIGHTS, NEW_WEIGHTS):
            # A step with gradients of zero may change the optimizer's state alone, which shows in the first real step.
            count = "early_changes" if stage == WEIGHTS else "early_steps"
            early = [any(rank[count] for rank in ranks) for ranks in self.heads]
            if early[0] != early[1]:
                yield _because("early-step", side=early[1])
        if stage in (BATCH, LOSS, OWN, REDUCED) and not first.name and not all(self.at(first, stage)):
            left, right = self.passes(first)
            if not left or not right:
                yield _because("number-of-steps", step=first.step)
            elif left != right:
                yield _because("number-of-passes", left=left, right=right)
        if stage in (WEIGHTS, BUFFERS):
            kind = "no-broadcast" + "-of-buffers" * (stage == BUFFERS)
            yield _because("initial-values") if side is None else _because(kind, side=1 - side)
        elif stage == BATCH:
            yield from self.of_batch(first, side)
        elif stage in (LOSS, OWN, REDUCED):
            yield from self.of_numbers(first, side)
        elif stage == SETTINGS:
            yield self.of_settings(first)
        elif stage == NEW_BUFFERS:
            if side is None and first.rank > 0 and first.name:
                # Rank 0's are equal: on one side it sent them before a forward, so that the others' are nearer to them.
                key = first.step, stage, 0
                values = [
                    [ranks[rank][key][first.name][2] for rank in (0, first.rank)] for ranks in self.sides
                ]
                side = int(math.dist(*values[1]) < math.dist(*values[0]))
            if side is not None:
                yield _because("no-broadcast-of-buffers", side=1 - side)

    def of_batch(self, first: Difference, agreeing: int | None) -> Iterator[Cause]:
        found: list[list[Any]] = [[], []]
        for values, side in zip(found, self.sides, strict=True):
            for (step, stage, number), batch in side[first.rank].items():
                if stage == BATCH and (step, number) <= (first.step, first.number):
                    values.append([_bits(value) for value in batch.values()])
        repeats = [values[-1:] != [] and values[-1] in values[:-1] for values in found]
        if repeats[0] != repeats[1]:
            yield _because("set-epoch", side=repeats[1])
        yield _because("data-order") if agreeing is None else _because("no-sampler", side=agreeing)

    def of_numbers(self, first: Difference, agreeing: int | None) -> Iterator[Cause]:
        for stages in ((LOSS, OWN), (REDUCED,)):
            found = [
                [
                    rank
                    for rank, entries in enumerate(side)
                    for (step, stage, _), values in entries.items()
                    if step == first.step and stage in stages and not all(map(_is_finite, values.values()))
                ]
                for side in self.sides
            ]
            if bool(found[0]) != bool(found[1]):
                yield _because("overflow", side=not found[0], rank=max(found)[0])
        ratio, passes = self.ratio(first), max(self.passes(first))
        if first.stage != REDUCED:
            yield from self.of_modules()
        elif agreeing is not None and self.same_size:
            yield _because("no-reduction", side=1 - agreeing, name=first.name)
        elif ratio is not None and _is_factor(ratio, *self.sizes):
            yield _because("average-or-sum", side=ratio < 1)
        if ratio is not None and _is_factor(ratio, passes):
            yield _because("accumulation", side=ratio < 1, passes=passes)
        if first.stage != REDUCED:
            yield from self.of_random(first)
        else:
            narrow = [values.get(first.name, [None])[-1] for values in self.at(first, REDUCED)]
            if first.size < _WIRE and narrow[0] != narrow[1]:
                yield _because("wire-dtype", side=not narrow[0], dtype=narrow[0] or narrow[1])
        if ratio is not None:
            yield _because("scale", stage=first.stage, ratio=ratio)

    def of_modules(self) -> Iterator[Cause]:
        if not self.same_size:
            yield _because("global-batch")
        left, right = (ranks[0]["modules"] for ranks in self.heads)
        names = [name for name in left | right if left.get(name) != right.get(name)]
        if any("SyncBatchNorm" in name for name in names):
            synced = [sum(made[name] for name in made if "SyncBatchNorm" in name) for made in (left, right)]
            yield _because("sync-batch-norm", left=synced[0], right=synced[1])
        if names:
            yield _because("model", names=", ".join(names))

    def of_random(self, first: Difference) -> Iterator[Cause]:
        left, right = (side[first.rank] for side in self.sides)
        names: list[str] = []
        seen: set[str] = set()  # generators that differed before, when the results were equal
        for key in (key for key in left if key[1] == RANDOM and key in right):
            if key[0] < first.step or (key[0] == first.step and key[2] <= first.number):
                seen.update(names)
                names = [name for name, state in left[key].items() if state != right[key].get(name)]
        names = [name for name in names if name not in seen]
        names = [name for name in names if name in _OF_LAYERS] or names
        if names:
            yield _because("random-numbers", names=" and ".join(names))

    def of_settings(self, first: Difference) -> Cause:
        left, right = (values.get(first.name) for values in self.at(first, SETTINGS))
        is_rate = first.name.startswith("lr of") and isinstance(left, float) and isinstance(right, float)
        if not is_rate or not left or not right:
            return _because("settings", name=first.name, left=left, right=right)
        by = " by the number of processes" * _is_factor(left / right, *self.sizes)
        return _because("learning-rate", left=left, right=right, by=by)


def _bits(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def _is_finite(value: Any) -> bool:
    number = value[1] if isinstance(value, list) else value
    return number is None or math.isfinite(number)


def _is_factor(ratio: float, *numbers: int) -> bool:
    """Whether `ratio` is one of the numbers above 1 or its inverse, as far as rounding allows."""
    factors = [factor for number in numbers if number > 1 for factor in (number, 1 / number)]
    return any(math.isclose(ratio, factor, rel_tol=1e-2) for factor in factors)


_CAUSES = """
rounding: Only rounding: the difference began below what a reordered sum changes, and grew slowly from value to value.
    Nothing is wrong. Compare fewer steps, or pass a larger --tolerance.
rounding-jump: Probably rounding: the loss is equal, but a gradient jumps as where ReLU or pooling takes another branch.
    Compare fewer steps, or pass a larger --tolerance.
unknown: No known cause explains that the {stage} differs first.
    Compare the two environments: variables, versions, and branches of the script that depend on them.
early-step: On the {side}, the optimizer made a step before any backward, as Horovod's broadcast_optimizer_state does.
    Use dualdist's broadcast_optimizer_state, or broadcast the parameters after the optimizer's state.
no-broadcast: On the {side}, the ranks begin with different weights: the parameters were not broadcast.
    Call broadcast_parameters(model.state_dict(), root_rank=0), or use DistributedDataParallel.
no-broadcast-of-buffers: On the {side}, the ranks have different buffers: they were not broadcast.
    Broadcast model.state_dict(), which has the buffers, or pass broadcast_buffers=True.
initial-values: The sides begin with other values: another seed, checkpoint or release of torch.
    Set the seed before the model is made, or load the same checkpoint.
set-epoch: The {side} repeats batches that it has seen, the other side does not: all its epochs have the same order.
    Call sampler.set_epoch(epoch) before each epoch.
no-sampler: On the {side}, all ranks read the same batch: the data is not divided among them.
    Give the DataLoader a DistributedSampler with the rank and the number of ranks.
data-order: The batches differ first: another seed of the sampler, order of files, division, or random augmentation.
    Give the sampler the same seed, rank and number of ranks on both sides.
global-batch: The mean losses differ first: the two sides read other data in a step, or a layer sees its rank's alone.
    Divide the batch by the number of processes. Plain BatchNorm and dropout differ with that number.
overflow: An overflow: a loss or gradient of rank {rank} on the {side} is infinite or NaN.
    Look at this rank's batch; lower the learning rate or the loss scale, or clip the gradients.
sync-batch-norm: Left has {left} layers of SyncBatchNorm and right {right}: the others see the batch of one rank.
    Call SyncBatchNorm.convert_sync_batchnorm(model) on both sides, or on none.
model: The models have other numbers of {names}.
    Compare the versions, and branches of the script that build the model.
random-numbers: Batch and weights are equal, but the random generator of {names} is in another state: dropout differs.
    Seed it in the same way on both sides, for example with seed_everything(seed, rank_offset=True).
accumulation: The {side} sums over the {passes} passes of a step, and the other side averages.
    Divide the loss by the number of passes on both sides, or on none.
number-of-passes: The left makes {left} backward passes in this step, and the right {right}.
    Accumulate over the same number of passes on both sides, and skip the same steps.
number-of-steps: After {step} steps one side ends: other lengths of the data, or a step that a GradScaler skipped.
    Compare drop_last, and the numbers of batches and epochs.
no-reduction: On the {side}, the ranks apply different gradients of {name}: it is not reduced.
    Wrap the optimizer or model with all its parameters, and leave no_sync() before a step's last backward.
average-or-sum: The {side} sums the gradients of the ranks, and the other side averages them.
    Pass the same op, Average or Sum, on both sides, and accumulate in the same way.
wire-dtype: The reduced gradients of the {side} have only values of {dtype}: they are sent in another dtype.
    Use the same compression or communication hook on both sides, or none.
scale: The {stage} of the left is {ratio:.6g} times that of the right: it is scaled or clipped in another way.
    Compare the scale of the loss, clipping, and factors of the reduction.
settings: {name} is {left} on the left and {right} on the right.
    Set the same value on both sides.
learning-rate: The learning rate is {left:g} on the left and {right:g} on the right: one side scales it{by}.
    Scale it with hvd.size() on both sides or on none, and compare schedulers and warm-up.
optimizer-state: Gradients and settings are equal, but the weights change differently: the optimizer's state differs.
    Broadcast or load the optimizer's state on both sides, or on none.
"""
"""Of each cause the kind, why, and in the next line what to do."""


def _because(kind: str, side: int = 0, **values: Any) -> Cause:
    text, remedy = _CAUSES.partition(f"\n{kind}: ")[2].splitlines()[:2]
    return Cause(kind, text.format(side=("left", "right")[side], **values), remedy.strip())
