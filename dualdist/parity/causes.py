"""Why two trainings differ: a cause is named only if what was recorded excludes the others. No torch here.

A test is what was recorded of the left and of the right: if these differ, it may be the cause. Tests are made in groups
(`_tests`). The first group in which one differs has the cause, which excludes those of later groups. `_CAUSES` has the
words. What no test explains has no cause, but the result says what is equal.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from .records import COMPARED, WIDTH, Difference, Pair, Values, bits, hashes, is_finite

_WIRE = 2e-2
"""More than sending in bfloat16 changes. Each of its roundings changes a number by 2**-9 at most: this is ten such."""
_LINEAR = 3e-5
"""What is further from a sum of multiples of the ranks' gradients, relative to it, is not one."""
CERTAIN = ("layer", "random-numbers", "operation")
"""Facts that are no rounding, however small their effect is."""
_NUMBERS = ("output of the model", "loss", "own gradient")

Tests = dict[str, Sequence[Any]]
"""Kind of cause -> what was recorded of the left and of the right, and what else its text says."""


@dataclass(frozen=True)
class Cause:
    """Why two trainings differ, in a sentence, and what to do. kind: a short name for programs."""

    kind: str
    text: str
    remedy: str


def because(kind: str, left: Any = None, right: Any = None, by: str = "", **words: Any) -> Cause:
    """Return a cause in words. The side that it names is the one of which more was recorded."""
    text, remedy = _CAUSES.partition(f"\n{kind}: ")[2].splitlines()[:2]
    side = ("left", "right")["{side}" in text and left < right]
    return Cause(kind, text.format(side=side, left=left, right=right, by=by, **words), remedy.strip())


def cause(pair: Pair, found: Difference, harmless: set[Any]) -> Cause:
    """Return the only cause that explains the first difference, or what is excluded. harmless: see `facts`."""
    for tests in _tests(pair, found, harmless):
        failed = {kind: values for kind, values in tests.items() if values[0] != values[1]}
        causes = [because(kind, *failed[kind], name=found.name or "state", found=found) for kind in failed]
        if len(causes) > 1:
            return because("several", " Or: ".join(each.text for each in causes))
        if causes:
            return causes[0]
    before = COMPARED[: COMPARED.index(found.stage)]
    equal = [stage for stage in before if any(pair.at(found, stage)) or stage == "initial weights"]
    equal += ["layers", "operations", "random generators"] * (found.stage in _NUMBERS)
    return because("unknown", ", ".join(equal), _REST.get(found.stage, "nothing that is known"))


def facts(pair: Pair, found: Difference, harmless: set[Any]) -> Tests:
    """Return the layers, random generators and operations of a value that differ. Certain ones exclude the others.

    harmless: facts that had no effect on an equal value before, each with the stage of that value.
    """
    stage, tests = found.stage, dict[str, Sequence[Any]]()
    if stage not in (*_NUMBERS, "buffers after the step") or not pair.same_size:
        return tests
    if stage != "loss" or pair.at(found, "output of the model") == [{}, {}]:  # else the outputs are equal
        tests |= _layers(pair, found)
    if stage != "buffers after the step":
        left, right = pair.at(found, "random states")
        used = (name for name in left.keys() & right.keys() if left[name][1] or right[name][1])
        names = sorted(name for name in used if left[name][0] != right[name][0])
        tests |= {"random-numbers": ("", " and ".join(names))} if names else {}
        if tests.keys().isdisjoint(CERTAIN):  # else these follow
            tests |= _operations(pair, found)
    tests = {kind: values for kind, values in tests.items() if (stage, kind, *values) not in harmless}
    return {kind: tests[kind] for kind in CERTAIN if kind in tests} or tests


def _layers(pair: Pair, found: Difference) -> Tests:
    left, right = pair.at(found, "layers")
    if pair.heads[0][0]["torch"] != pair.heads[1][0]["torch"]:  # releases show other arguments
        left, right = ({name: re.sub(r"\(.*\)", "", made[name]) for name in made} for made in (left, right))
    names = [name for name in left | right if left.get(name) != right.get(name)]
    # Of another class, a layer may compute the same.
    same_class = [name for name in names if _class(left.get(name)) == _class(right.get(name))]
    kind, name = "layer" if same_class else "class", [*same_class, *names, ""][0]
    shown = (made.get(name, "missing") for made in (left, right))
    return {kind: (*shown, f"layer {name}" if name else "model")} if names else {}


def _class(layer: str | None) -> str | None:
    """Return the class of a layer, which is the same for SyncBatchNorm and the layers that it replaces."""
    return re.sub(r"Sync(?=BatchNorm)|\dd?$", "", layer.partition("(")[0]) if layer else layer


def _operations(pair: Pair, found: Difference) -> Tests:
    made: list[list[Any]] = []
    for values in pair.at(found, "operations"):
        operations: list[Any] = values.get("", [])
        names = [name for name, _ in operations]
        place = names.index("") if "" in names else len(names) * (found.stage == "loss")
        of_stage = {"output of the model": operations[place:], "loss": operations[:place]}
        made.append([*of_stage.get(found.stage, operations)])  # of a gradient, all
    left, right = made
    for end in (0, -1):
        while left and right and _same_operation(left[end], right[end]):
            del left[end], right[end]
    same_name = bool(left and right) and left[0][0] == right[0][0]
    shown = [_shown(operations[: 1 if same_name else 4]) for operations in made]
    return {"operation" if same_name else "operations": shown} if left or right else {}


def _same_operation(left: Any, right: Any) -> bool:
    pairs = [(left[1][name], right[1][name]) for name in left[1].keys() & right[1].keys()]
    same = [one == other or math.isclose(one, other, rel_tol=1e-5) for one, other in pairs]
    return left[0] == right[0] and all(same)


def _shown(operations: Sequence[Any]) -> str:
    """Return operations as text, the first one first."""
    numbers = [", ".join(f"{key}={made[key]:g}" for key in made) for _, made in operations]
    shown = [f"{name}({text})" for (name, _), text in zip(operations, numbers, strict=True)]
    return ", ".join(shown[::-1]) or "nothing"


def _tests(pair: Pair, found: Difference, harmless: set[Any]) -> Iterator[Tests]:
    """Yield groups of tests for the first difference. A test of both sides has 0 for the left."""
    stage, is_begin, values = found.stage, found.step == pair.begin, pair.at(found, found.stage)
    if stage in ("initial weights", "initial buffers"):
        yield from _of_start(pair, found)
        return
    yield from _of_passes(pair, found)
    if stage == "batch":
        yield from _of_batch(pair, found)
    elif stage in ("targets", *_NUMBERS):
        yield from _of_numbers(pair, found, harmless)
    elif stage == "reduced gradient":
        yield {"reduction": [_reduced(pair, found, side) for side in (0, 1)]}
    elif stage == "settings of the optimizer":
        yield {"settings": _settings(pair, found)}
    elif stage == "state of the optimizer":
        early = [any(made for *_, made in pair.of(side, "weights before an early step")) for side in (0, 1)]
        yield {"early-step": early} if is_begin else {}
        yield {"optimizer-state": (0, 1)}
    elif stage == "weights before the forward":
        yield {"outside": [values[0] != {}, values[1] != {}]}
    elif stage == "buffers after the step" and found.name:
        yield facts(pair, found, harmless)
        # If rank 0's are equal, it has sent them before a forward, so that the others' are nearer to them, or not.
        each = zip(pair.at(found, stage, 0), values, strict=True)
        sketches = [[made.get(found.name, [0, 0, []])[2] for made in of] for of in each]
        yield {"no-broadcast-of-buffers": [len(root) == len(own) and math.dist(root, own) for root, own in sketches]}


def _of_start(pair: Pair, found: Difference) -> Iterator[Tests]:
    split = _split(pair, found)
    other: Tests = {"initial-values": (0, split[0] == split[1] or not found.rank)}
    if found.stage == "initial weights":
        early = [hashes(values) for values in pair.at(found, "weights before an early step")]
        start = [hashes(values) for values in pair.at(found, found.stage)]
        yield {"parameters": _kinds(pair, found)}
        yield {"early-step": [early[side] != {} and early[side] == start[1 - side] for side in (0, 1)]}
        has_changed = [early[side] not in ({}, start[side]) for side in (0, 1)]
        yield {"early-step": has_changed, "no-broadcast": split, **other}
    yield {"no-broadcast-of-buffers": split, **other}


def _of_passes(pair: Pair, found: Difference) -> Iterator[Tests]:
    passes: list[Counter[int]] = []
    for side, size in enumerate(pair.sizes):
        rank = min(found.rank, size - 1)
        passes.append(Counter(key[0] for own, key, _ in pair.of(side, "loss") if own == rank))
    left, right = (own[found.step] for own in passes)
    yield {"number-of-steps": (left > 0, right > 0)}
    is_once = any(passes[0][step] == passes[1][step] for step in passes[0])
    if pair.same_size and not (is_once and all(pair.at(found, found.stage))):  # else a result differs first
        yield {"number-of-passes": (left, right, "this step, but not in all" if is_once else "each step")}


def _of_batch(pair: Pair, found: Difference) -> Iterator[Tests]:
    step, rank, is_later = found.step, found.rank, (found.step, found.number) > (pair.begin, 0)
    read = [[(key[0], own, values[""]) for own, key, values in pair.of(side, "samples")] for side in (0, 1)]
    batch = [values.get("", []) for values in pair.at(found, "samples")]
    yield {"overflow": [not is_finite(values) for values in pair.at(found, "batch")]}
    by = ", and was of the same size before: one side ends an epoch" * is_later
    yield {"batch-size": (*_kinds(pair, found), by)}
    yield {"no-sampler": [not is_split for is_split in _split(pair, found)]}
    others = [[samples for at, own, samples in side if at != step and own == rank] for side in read]
    yield {"sampler-state": [batch[0] in others[1], batch[1] in others[0]]} if step == pair.begin else {}
    in_step = [Counter(one for at, _, samples in side if at == step for one in samples) for side in read]
    yield {"division": (0, in_step[0] == in_step[1] != Counter())}
    before = [[(own, samples) for at, own, samples in side if at < step] for side in read]
    again = [any(not set(batch[side]).isdisjoint(made) for _, made in before[side]) for side in (0, 1)]
    yield {"epoch-end": again}
    yield {"set-epoch": [(rank, batch[side]) in before[side] for side in (0, 1)]}
    in_all = [Counter(one for *_, samples in side for one in samples) for side in read]
    is_shared = not in_all[0].keys().isdisjoint(in_all[1])
    yield {"data-order": (0, is_shared and not is_later)}
    # All data has been read if samples were read again.
    is_part = max((in_all[0] + in_all[1]).values(), default=0) == 1
    by = ", or these steps read another part of it" * is_part
    yield {"other-data": (0, all(in_all) and not is_shared, by)}


def _of_numbers(pair: Pair, found: Difference, harmless: set[Any]) -> Iterator[Tests]:
    if not pair.same_size:
        entries = [pair.of(side, "samples", found.step) for side in (0, 1)]
        left, right = (Counter(sample for *_, values in side for sample in values[""]) for side in entries)
        yield {"rank-part": (0, left == right)}
        yield {"global-batch": (0, 1)}
    yield {"targets": (0, found.stage == "targets")}
    factor = _scale(pair, found)
    passes = sum(rank == found.rank for rank, *_ in pair.of(0, "loss", found.step))
    yield {"scale": (factor, 1, f" by the number of passes, {passes}" * _is_factor(factor, passes))}
    yield facts(pair, found, harmless)
    yield {"overflow": [not is_finite(values) for values in pair.at(found, found.stage)]}


def _scale(pair: Pair, found: Difference) -> float:
    """Return by which factor all losses and gradients of the left are the right's, on each rank; 1 if by none."""
    factors = []
    for rank in range(pair.sizes[0]):
        grads = pair.at(found, "own gradient", rank)
        left, right = (_sketch(values, grads[0]) for values in grads)
        square = float(right @ right)
        if found.stage == "output of the model" or not 0 < square < math.inf or not numpy.isfinite(left).all():
            return 1.0
        factors.append(float(left @ right) / square)
        if numpy.linalg.norm(left - factors[-1] * right) > 1e-4 * numpy.linalg.norm(left):
            return 1.0
        one, other = (values.get("") for values in pair.at(found, "loss", rank))
        factors += [one / other] if one and other else []
    is_same = all(math.isclose(factor, factors[0], rel_tol=1e-4) for factor in factors)
    return factors[0] if is_same and not math.isclose(factors[0], 1, rel_tol=1e-4) else 1.0


def _reduction(
    pair: Pair, found: Difference, side: int, step: int, names: Iterable[str] = ()
) -> tuple[Any, float, float, float]:
    """Return by which factors a rank's reduced gradients have those of each rank and pass, and those before.

    The factors are 1 in a mean over the ranks. Return also how much of them is neither, and their norm.
    """
    ranks = pair.sides[side]
    here = ranks[min(found.rank, len(ranks) - 1)]
    reduced, before = (here.get((each, "reduced gradient", 0), {}) for each in (step, step - 1))
    own = [values for *_, values in pair.of(side, "own gradient", step)]
    target, *columns = (_sketch(values, names or reduced) for values in (reduced, *own, before))
    if not own or not target.any() or not numpy.isfinite([target, *columns]).all():
        return numpy.zeros((1, 1)), 0.0, math.inf, 0.0
    matrix = numpy.stack(columns, 1)
    factors = numpy.linalg.lstsq(matrix, target, rcond=1e-5)[0]
    rest = float(numpy.linalg.norm(matrix @ factors - target) / numpy.linalg.norm(target))
    norm = math.hypot(*(value[1] for value in reduced.values()))
    return factors[:-1].reshape(len(ranks), -1) * len(ranks), factors[-1], rest, norm


def _reduced(pair: Pair, found: Difference, side: int) -> str:
    """Return in words how the reduced gradients of a side were made of the ranks' own."""
    steps = sorted({key[0] for _, key, _ in pair.of(side, found.stage) if key[0] >= pair.begin})
    history = [_reduction(pair, found, side, step) for step in steps]
    factors, kept, rest, norm = history[steps.index(found.step)]
    of_name, _, rest_of_name, _ = _reduction(pair, found, side, found.step, [found.name])
    mean, of_all = factors.mean(), [made[0].mean() for made in history]
    clipped = [made[3] for made in history if made[0].mean() < 0.999]
    narrow, split = pair.at(found, found.stage)[side].get(found.name, [None])[-1], _split(pair, found)
    if split[side] > split[1 - side] and abs(numpy.delete(of_name, found.rank, 0)).max(0).min() < 1e-2:
        key = found.step, "weights after the step", 0
        after = [hashes(rank.get(key, {})) for rank in pair.sides[side]]
        are_equal = all(weights == after[0] for weights in after)
        return f"each rank's own of {found.name}: {'its step is' if are_equal else 'they are not'} reduced"
    if math.isinf(rest):
        return "zero, infinite or NaN"
    if rest >= _LINEAR and rest_of_name < _LINEAR and of_name.std() < 1e-2:
        return f"{of_name.mean():.4g} times the mean for {found.name}, but not for all"
    if rest >= _LINEAR:
        unlike = f"no sum of multiples of these: {rest:.1e} of them is something else"
        return f"rounded to {narrow}" if narrow and found.size < _WIRE else unlike
    if abs(kept) > 1e-2:
        return f"their mean, and {kept:.4g} times those of the step before"
    if not numpy.allclose(factors, mean, rtol=1e-2):
        shown = ", ".join(f"{round(float(abs(own).mean()), 3):g}" for own in factors)
        return f"a mean in which the ranks have the factors {shown}"
    if mean < 0.999 and len(clipped) > 1 and numpy.allclose(clipped, norm, rtol=1e-3):
        return f"their mean, clipped to the norm {norm:.4g}"
    known = {1: "their mean", len(factors): "their sum"}
    names = [known[factor] for factor in known if math.isclose(mean, factor, rel_tol=1e-4)]
    in_each = " in each step" * (len(steps) > 1 and numpy.allclose(of_all, mean, rtol=1e-3))
    return [*names, f"{mean:.6g} times their mean"][0] + in_each


def _settings(pair: Pair, found: Difference) -> Sequence[Any]:
    """Return the setting on both sides, and where the difference may be from."""
    name, is_begin = found.name, found.step == pair.begin
    left, right = (values.get(name) for values in pair.at(found, found.stage))
    entries = [pair.of(side, found.stage) for side in (0, 1)]
    rates = [{key[0]: values.get(name) for rank, key, values in side if not rank} for side in entries]
    by = ""
    if pair.begin and is_begin and rates[0].get(0, rates[1].get(0)) in (left, right):
        by = ", as in step 0 on one side: it was not restored"
    elif name.startswith("lr of") and not is_begin:
        by = ", after equal steps: compare how often the schedulers make a step"
    elif name.startswith("lr of"):
        pairs = [(rate, rates[1].get(step)) for step, rate in rates[0].items()]
        is_size = all(rate and other and _is_factor(rate / other, *pair.sizes) for rate, other in pairs)
        by = ": one side scales it by the number of processes" * is_size
    return left, right, by


def _split(pair: Pair, found: Difference) -> list[bool]:
    """Return whether ranks of a side have different values where the difference is."""
    values = [[bits(rank.get(found.key, {}).get(found.name)) for rank in side] for side in pair.sides]
    return [any(value != own[0] for value in own) for own in values]


def _kinds(pair: Pair, found: Difference) -> list[str]:
    """Return dtype and shape of the value that differs."""
    return [values[found.name][3] if found.name in values else "missing" for values in pair.at(found, found.stage)]


def _sketch(values: Values, names: Iterable[str]) -> Any:
    """Return the sketches of all tensors in one vector; those that are missing count as zero."""
    return numpy.array([values[name][2] if name in values else [0.0] * WIDTH for name in names]).reshape(-1)


def _is_factor(ratio: float, *numbers: int) -> bool:
    """Whether `ratio` is one of the numbers above 1 or its inverse, as far as rounding allows."""
    factors = [factor for number in numbers if number > 1 for factor in (number, 1 / number)]
    return any(math.isclose(ratio, factor, rel_tol=1e-4) for factor in factors)


_REST = {
    "output of the model": "data that the forward uses besides its arguments, or code without an operation that has a "
    "gradient",
    "loss": "how the loss is made of the outputs: its function, targets and weights",
    "own gradient": "the backward: hooks on gradients, and where they stop",
    "reduced gradient": "what changes gradients between the backward and the step",
    "batch": "how samples are drawn: lengths and seeds of epochs, random augmentation",
    "weights after the step": "the code of the optimizer's step",
    "buffers after the step": "what changes buffers besides the forward",
}
"""What may differ if nothing that is recorded does."""
_CAUSES = """
rounding: Only rounding: the differences are at first not larger than a reordered sum makes them, and grow slowly.
    Nothing is wrong. Compare fewer steps, or pass a larger --tolerance.
rounding-jump: Only rounding: it has changed the sign of single numbers, where ReLU or pooling take another branch.
    Nothing is wrong. Compare fewer steps, or pass a larger --tolerance.
unknown: Unknown. Excluded, because equal up to rounding: {left}. What is left: {right}.
    Compare this part of the script on both sides, then the environments: variables and versions.
several: What was recorded does not tell apart: {left}
    Make these equal one after the other.
early-step: On the {side}, the optimizer made a step before any backward, as Horovod's broadcast_optimizer_state does.
    Use dualdist's broadcast_optimizer_state, or broadcast the parameters after the optimizer's state.
parameters: The models differ: parameter {name} is {left} on the left and {right} on the right.
    Compare the code that makes the model: sizes, shared weights, and what the optimizer is given.
no-broadcast: On the {side}, the ranks begin with different weights: the parameters were not broadcast.
    Call broadcast_parameters(model.state_dict(), root_rank=0), or use DistributedDataParallel.
no-broadcast-of-buffers: On the {side}, the ranks have different buffers: they were not broadcast.
    Broadcast model.state_dict(), which has the buffers, or pass broadcast_buffers=True.
initial-values: The sides begin with other values: another seed, checkpoint, root of the broadcast, or release of torch.
    Set the seed before the model is made, or load the same checkpoint, and broadcast from the same rank.
batch-size: The batch is {left} on the left and {right} on the right{by}.
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
data-order: Both sides read the same samples in another order: other seeds or samplers, lengths, or order of data.
    Give the sampler the same seed, rank and number of ranks on both sides.
other-data: Neither side reads a sample of the other: the data differs, or what prepares it{by}.
    Compare the data, what prepares it, random augmentation, and the seeds of samplers.
global-batch: The mean losses differ first, and the sides read other samples in this step.
    Divide the batch by the number of processes, and deal the samples in the same order.
rank-part: The mean losses of the same samples differ first: a layer or the loss depends on the part of the rank.
    Plain BatchNorm, dropout, and a loss that is no mean over the batch, differ with the number of processes.
overflow: On the {side}, the {found.stage} of rank {found.rank} is infinite or NaN.
    Look at this rank's batch; lower the learning rate or the loss scale, or clip the gradients.
targets: Batches and outputs are equal, but the targets of {name} differ.
    Compare what prepares the targets.
layer: The {by} is {left} on the left and {right} on the right.
    Give layers the same arguments, train() or eval(), autocast and requires_grad_() on both sides.
class: The {by} is {left} on the left and {right} on the right.
    Make the layers in the same way on both sides.
random-numbers: The random generator of {right}, which the forward uses, is in another state: dropout differs.
    Seed it in the same way on both sides, for example with seed_everything(seed, rank_offset=True).
operation: An operation of the forward or loss is {left} on the left and {right} on the right.
    Compare the loss function, its scale, and the code of the forward.
operations: The forward or loss computes {left} on the left, where the right computes {right}.
    Compare the loss function, its scale, and the code of the forward.
scale: The loss of the left is {left:.6g} times that of the right, and so are all gradients: it is scaled{by}.
    Compare the scale of the loss: GradScaler, weights, `reduction`, or a division by passes or samples.
number-of-passes: The left makes {left} backward passes in {by}, and the right {right}.
    Accumulate over the same number of passes on both sides, and skip the same steps.
number-of-steps: After {found.step} steps one side ends: other lengths of the data, or a step that a GradScaler skipped.
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
