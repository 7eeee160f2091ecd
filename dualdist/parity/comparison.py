"""Compares the records of two trainings: the first value that differs by more than rounding, and why. No torch here.

Weights, batches and settings are no sums: a difference of theirs is never rounding. A cause is named only if what was
recorded excludes the others, or with what it may hide. A test is what was recorded of the left and of the right. The
first one in which these differ has the cause, which excludes the later ones (`_tests`). `_CAUSES` has the words. What
no test explains has no cause, but the result says what is equal.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from .records import COMPARED, EVERYWHERE, WIDTH, Difference, Pair, Record, Values, bits, difference, hashes, is_finite

_AFTER = ("weights after the step", "buffers after the step", "weights before the forward")
_FRESH, _GROWTH = 4, 30
"""Rounding is at first this many times what another order of a sum changes, and grows by less than the second from
value to value. The second is a choice: a layer or step multiplies by less."""


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
    pair = Pair(left, right, start)
    rounding = _Rounding(pair)
    first = least = why = None
    sizes = [0.0] * len(pair.losses)
    for found in pair.differences():
        fact = _fact(pair, found) if first is None else None
        if not found.size:
            pair.harmless.add((found.stage, fact))
            continue
        least = least or found
        if rounding.is_loud_weight(found) and found.step - pair.begin < len(sizes):
            sizes[found.step - pair.begin] = max(sizes[found.step - pair.begin], found.size)
        if first is None and not rounding.explains(found, fact is not None and fact[0] in _CERTAIN):
            first, why = found, _cause(pair, found)
    if first is None and rounding.largest > tolerance:
        why = _because("rounding-jump" if rounding.has_jumped else "rounding")
    notes = list(_notes(pair, first, least, why))
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
        no_sum = found.stage in ("initial weights", "initial buffers", "settings of the optimizer")
        # After rounding, an argument of a forward may have been computed with the weights, as a hidden state is.
        no_sum |= found.stage == "batch" and not self.largest
        if no_sum or math.isinf(found.size) or is_certain:
            return False
        is_after, is_weight = found.stage in _AFTER, self.is_loud_weight(found)
        grown = _GROWTH * max(self._level, self._gradients * (found.stage == "state of the optimizer"))
        # In numbers of 16 bits, few are rounded to another one, by much.
        limit = max(self._fresh, grown, math.sqrt(grown * self._low))
        is_gradient = found.stage in ("own gradient", "reduced gradient")
        if is_gradient and not is_first and self._low:  # of a small model, one number is much
            counts = [_count(value) for value in self._pair.at(found, found.stage)[0].values()]
            limit = max(limit, _FRESH * self._low / math.sqrt(max(counts, default=1) or 1))
        # Adam makes full steps also of gradients that are rounding: the outputs do not depend on these.
        is_small = found.size <= self._fresh or not is_first if is_after else found.size <= limit
        if not is_small and not (is_gradient and self._jumps(found)):
            return False
        is_result = is_small and not is_after and found.stage != "state of the optimizer"
        if is_result or (is_weight and self.has_jumped):
            self._level = max(self._level, found.size)
        self._gradients = max(self._gradients, found.size * (found.stage == "reduced gradient"))
        self.largest = max(self.largest, found.size * (is_weight or not is_after))
        return True

    def _jumps(self, found: Difference) -> bool:
        """Return whether rounding has changed the sign of enough numbers to change a gradient by so much."""
        if found.stage == "reduced gradient" and self._pair.same_size:
            sides = (self._pair.of(side, "own gradient", found.step) for side in (0, 1))
            own = ([values.get(found.name) for *_, values in side] for side in sides)
            if found.size > _GROWTH * max((difference(*both) for both in zip(*own, strict=False)), default=1.0):
                return False  # what is reduced has not jumped
        changed = total = 0.0
        for rank, key, values in self._pair.of(0, "branches", found.step):
            others = self._pair.sides[1][rank].get(key, {}) if self._pair.same_size else {}
            for name, value in values.items() if others else ():
                total += (count := _count(value))
                other: Any = others.get(name, value)
                changed += min(count, math.dist(value[2], other[2]) ** 2)
        jumps = found.size**2 <= min(0.1, 100 * changed / max(total, 1))
        self.has_jumped |= jumps
        return jumps


def _count(value: Any) -> int:
    """Return how many numbers a tensor has."""
    return math.prod(map(int, re.findall(r"\d+", value[3].partition("[")[2])))


def _notes(pair: Pair, first: Difference | None, least: Difference | None, why: Cause | None) -> Iterator[str]:
    """Yield what a reader of the result should know."""
    if not pair.same_size:
        text = "processes: compared are only the mean loss, and rank 0's weights, reduced gradients and settings."
        yield f"{pair.sizes[0]} and {pair.sizes[1]} {text}"
    if pair.begin:
        yield f"One side begins with step {pair.begin} of the other, from which on they are compared."
    left, right = (ranks[0] for ranks in pair.heads)
    for name in ("threads", "torch", "device") if least else ():
        if left[name] != right[name]:
            yield f"Left has {name} {left[name]} and right {right[name]}, which can change the order of sums."
    for stages, text in (
        (("loss", "own gradient"), "losses or gradients are infinite or NaN"),
        (("initial weights",), "the ranks begin with different weights"),
        (("weights after the step",), "the ranks train different weights"),
    ):
        steps: list[list[int]] = [[], []]
        for side, stage in itertools.product((0, 1), stages):
            for _, key, values in pair.of(side, stage):
                is_equal = hashes(values) == hashes(pair.sides[side][0].get(key, {}))
                is_even = is_finite(values) if stage in _NUMBERS else is_equal
                steps[side] += [key[0]] * (key[0] >= pair.begin - 1 and not is_even)
        if all(steps):
            yield f"On both sides, {text} (first in step {max(0, min(map(min, steps)))})."
    names: list[set[str]] = [set(), set()]
    for rank, key, _ in pair.of(0, "random states") if first else ():
        for is_used in (False, True):
            names[is_used].update(_generators(pair, Difference(*key, rank, "", 0.0), is_used))
    if unused := sorted(names[False] - names[True]):
        yield f"The random generators of {' and '.join(unused)} differ, but no forward uses them."
    differing = (found for found in pair.differences(["collective"]) if found.size)
    if pair.same_size and (found := next(differing, None)):
        one, other = (values.get("", "none") for values in pair.at(found, "collective"))
        text = f"differ first in step {found.step}, rank {found.rank}, call {found.number}"
        yield f"The script's collectives {text}: {one} on the left, {other} on the right."
    if first and why:
        of_optimizer = list(pair.differences(["settings of the optimizer"]))
        settings = [one for one in of_optimizer if one.size and one.name and one != first]
        shown = [f"{one.name} (step {one.step})" for one in settings if one.key == settings[0].key and not one.rank]
        if pair.same_size:
            layers = [f"layer {name}" if name else "model" for name in _layers(pair, first)]
            operations = _operations(pair, dataclasses.replace(first, stage="own gradient"))
            shown += [layer for layer in layers if not why.text.startswith(f"The {layer} is ")]
            if why.kind != "random-numbers":
                shown += [f"random generator of {name}" for name in _generators(pair, first)]
            if operations and not why.kind.startswith("operation"):
                shown.append(f"operations ({operations[1]} / {operations[2]})")
        if shown:
            yield f"These differ, too, as an effect of the cause or without an effect: {_short(shown)}."


# Causes

_WIRE = 2e-2
"""More than sending in bfloat16 changes. Each of its roundings changes a number by 2**-9 at most: this is ten such."""
_LINEAR = 3e-5
"""What is further from a sum of multiples of the ranks' gradients, relative to it, is not one."""
_CERTAIN = ("layer", "random-numbers", "operation")
"""Facts that are no rounding, however small their effect is."""
_NUMBERS = ("output of the model", "loss", "own gradient")
_HIDING = (*_CERTAIN, "class", "operations", "overflow", "rank-part", "global-batch")
"""Causes of a computed value that may have a second cause, too."""

Test = tuple[Any, ...]
"""A kind of cause, what was recorded of the left and of the right, and what else its text says."""


def _because(kind: str, left: Any = None, right: Any = None, by: str = "", **words: Any) -> Cause:
    """Return a cause in words. The side that it names is the one of which more was recorded."""
    text, *lines = _CAUSES.partition(f"\n{kind}: ")[2].splitlines()
    remedy = next(line for line in lines if line.startswith(" "))
    side = ("left", "right")["{side}" in text and left < right]
    return Cause(kind, text.format(side=side, left=left, right=right, by=by, **words), remedy.strip())


def _short(names: Iterable[str]) -> str:
    return textwrap.shorten(", ".join(names), 300, placeholder=" ...")


def _cause(pair: Pair, found: Difference) -> Cause:
    """Return the cause of the first difference; if it is unknown, or hides others, with what is excluded."""
    failed = (test for test in _tests(pair, found) if test and test[1] != test[2])
    test = next(failed, None)
    cause = _because(*test, name=found.name or "state", found=found) if test else None
    if cause and cause.kind not in _HIDING:
        return cause
    *before, last = COMPARED[: COMPARED.index(found.stage) + 1]
    equal = [stage for stage in before if any(pair.at(found, stage)) or stage == "initial weights"]
    equal = [stage for stage in equal if pair.same_size or stage in EVERYWHERE]
    # What was not recorded of the stages before may differ as well.
    rest = [_REST[stage] for stage in (*before, last) if stage in _REST and stage not in equal]
    if found.stage in _NUMBERS:
        known = ((text, find) for stage, text, find in _FACTS if any(pair.at(found, stage)))
        equal += [text for text, find in known if not find(pair, found)]
        rest += ["changes of weights between the passes of a step"] * (found.number > 0)
    by = f"{cause.text} This may hide a second cause." if cause else "Unknown."
    unknown = _because("unknown", ", ".join(equal), "; ".join(rest) or "nothing that is known", by)
    return dataclasses.replace(cause, text=unknown.text) if cause else unknown


def _fact(pair: Pair, found: Difference) -> Test | None:
    """Return the layer that differs and explains a value, or else random generators, or else operations."""
    stage, facts = found.stage, list[Test | None]()
    if stage in (*_NUMBERS, "buffers after the step") and pair.same_size:
        if stage != "loss" or pair.at(found, "output of the model") == [{}, {}]:  # else the outputs are equal
            facts.append(_layer(pair, found))
        if stage != "buffers after the step":  # else these follow
            names = " and ".join(_generators(pair, found))
            facts += [("random-numbers", "", names) if names else None, _operations(pair, found)]
    return next((fact for fact in facts if fact and (stage, fact) not in pair.harmless), None)


def _generators(pair: Pair, found: Difference, is_used: bool = True) -> list[str]:
    """Return the random generators that differ and that the forward uses, or that it does not use."""
    left, right = pair.at(found, "random states")
    names = (name for name in left.keys() & right.keys() if left[name][0] != right[name][0])
    return sorted(name for name in names if (left[name][1] or right[name][1]) == is_used)


_DTYPE = re.compile(r" ((b?float|complex|u?int|bool)\d*)?(?= with |$)")


def _layers(pair: Pair, found: Difference) -> dict[str, list[str]]:
    """Return the layers that are not equal on both sides, in the order in which their calls end, the model last."""
    made = pair.at(found, "layers")
    if pair.heads[0][0]["torch"] != pair.heads[1][0]["torch"]:  # releases show other arguments
        made = [{name: re.sub(r"\(.*\)", "", side[name]) for name in side} for side in made]
    first, second = pair.at(found, "calls")
    # Where a side uses the weights of a layer without a call, the dtype of what it returns is not known.
    uncalled = (first.keys() ^ second.keys()) & made[0].keys() & made[1].keys()
    made = [side | {name: _DTYPE.sub(" ", side[name]) for name in uncalled} for side in made]
    both = {name: [side.get(name, "missing") for side in made] for name in [*(first | second), *made[0], *made[1]]}
    return {name: both[name] for name in sorted(both, key=lambda name: name == "") if both[name][0] != both[name][1]}


def _layer(pair: Pair, found: Difference) -> Test | None:
    """Return the first layer that is not equal, and whose result differs by much more than what it was given."""
    calls = pair.at(found, "calls")
    for name, shown in _layers(pair, found).items():
        called = [side[name] for side in calls if name in side] or [[[], []]]
        if len(called) == 1:  # a layer that one side does not have returns there what it would be given
            called.append([called[0][0]] * 2)
        pairs = (itertools.zip_longest(*made) for made in zip(*called, strict=True))
        given, returned = (max((difference(*made) for made in values), default=0.0) for values in pairs)
        is_why = returned > _GROWTH * given or not name or calls == [{}, {}]  # as of a model that is compiled
        if found.stage in ("own gradient", "buffers after the step"):  # what the forward returns is equal
            is_why = found.name.rpartition(".")[0] == name
        if is_why:
            # Of another class, a layer may compute the same.
            kind = "layer" if _class(shown[0]) == _class(shown[1]) else "class"
            return kind, *shown, f"layer {name}" if name else "model"
    return None


def _class(layer: str) -> str:
    """Return the class of a layer, which is the same for SyncBatchNorm and the layers that it replaces."""
    return re.sub(r"Sync(?=BatchNorm)|\dd?$", "", layer[: layer.find("(") + 1].rstrip("("))


def _operations(pair: Pair, found: Difference) -> Test | None:
    made: list[list[Any]] = []
    for values in pair.at(found, "operations"):
        operations = [*values.get("", []), ["", {}]]
        place = operations.index(["", {}])
        of_stage = {"output of the model": operations[place:], "loss": operations[:place]}
        made.append([*of_stage.get(found.stage, operations)])  # of a gradient, all
    left, right = made
    for end in (0, -1):
        while left and right and _is_same(*left[end], *right[end]):
            del left[end], right[end]
    if not left and not right:
        return None
    if left and right and left[0][0] == right[0][0]:
        return "operation", _shown(left[:1]), _shown(right[:1])
    names = [Counter(name for name, _ in operations if name) for operations in made]
    # Those that a side has more often; of as many in another order, the last ones.
    more: list[list[Any]] = [[(name, {}) for name in names[side] - names[1 - side]] for side in (0, 1)]
    return "operations", *(_shown(operations[:6]) for operations in (more if any(more) else made))


def _is_same(left: str, settings: Values, right: str, others: Values) -> bool:
    common = settings.keys() & others.keys()
    return left == right and all(difference(settings[name], others[name]) < 1e-5 for name in common)


def _shown(operations: Sequence[Any]) -> str:
    """Return operations as text, the first one first."""

    def text(value: Any) -> str:
        return value if isinstance(value, str) else f"{value:g}"

    shown = (f"{name}({', '.join(f'{key}={text(made[key])}' for key in made)})" for name, made in reversed(operations))
    return ", ".join(shown) or "nothing"


_FACTS: Sequence[tuple[str, str, Callable[[Pair, Difference], Any]]] = (
    ("layers", "layers", _layers),
    ("operations", "operations (with the settings that autograd keeps)", _operations),
    ("random states", "global random generators", _generators),
)
"""Recorded stages that are no results, what they say of one, and what finds a difference in them."""


def _tests(pair: Pair, found: Difference) -> Iterator[Test | None]:
    """Yield the tests for the first difference. A test of both sides has 0 for the left."""
    stage, is_begin, values = found.stage, found.step == pair.begin, pair.at(found, found.stage)
    if stage in ("initial weights", "initial buffers"):
        yield from _of_start(pair, found)
        return
    stepped = pair.at(dataclasses.replace(found, number=0), "weights after the step")
    alone = (_short(sorted(made.keys() - other.keys())) for made, other in (stepped, stepped[::-1]))
    yield ("other-optimizer", *(names or "nothing" for names in alone)) if all(stepped) else None
    yield from _of_passes(pair, found, stepped)
    if stage == "batch":
        yield from _of_batch(pair, found)
    elif stage in ("targets", *_NUMBERS):
        yield from _of_numbers(pair, found)
    elif stage == "reduced gradient":
        yield "reduction", *(_reduced(pair, found, side) for side in (0, 1))
    elif stage == "settings of the optimizer":
        left, right = ({key[0]: made for rank, key, made in pair.of(side, stage) if not rank} for side in (0, 1))
        rates = [(made.get(found.name), right.get(step, {}).get(found.name)) for step, made in left.items()]
        is_lr = found.name.startswith("lr of") and is_begin
        is_size = is_lr and all(one and other and _is_factor(one / other, *pair.sizes) for one, other in rates)
        by = ", in the ratio of the number of processes" * is_size
        yield "settings", *(made.get(found.name) for made in values), by
    elif stage == "state of the optimizer":
        early = [[*pair.of(side, "weights before an early step", found.step - 1)] for side in (0, 1)]
        yield ("early-step", *(any(made for *_, made in of) for of in early)) if is_begin else None
        yield "optimizer-state", 0, 1
    elif stage == "weights before the forward":
        yield "outside", values[0] != {}, values[1] != {}
    elif stage == "buffers after the step" and found.name:
        yield _fact(pair, found)
        # If rank 0's are equal, it has sent them before a forward, so that the others' are nearer to them, or not.
        each = zip(pair.at(found, stage, 0), values, strict=True)
        sketches = [[made.get(found.name, [0, 0, []])[2] for made in of] for of in each]
        distances = (len(root) == len(own) and math.dist(root, own) for root, own in sketches)
        yield "no-broadcast-of-buffers", *distances


def _of_start(pair: Pair, found: Difference) -> Iterator[Test]:
    split, is_buffer = _split(pair, found), found.stage == "initial buffers"
    may_be: list[Test] = [("no-broadcast-of-buffers" if is_buffer else "no-broadcast", *split)]
    may_be.append(("initial-values", 0, split[0] == split[1] or not found.rank))
    yield "parameters", *_kinds(pair, found), "buffers" if is_buffer else "parameters to train"
    if not is_buffer:
        early, start = (list(map(hashes, pair.at(found, of))) for of in ("weights before an early step", found.stage))
        yield "early-step", *(early[side] != {} and early[side] == start[1 - side] for side in (0, 1))
        may_be.append(("early-step", *(early[side] not in ({}, start[side]) for side in (0, 1))))
    failed = [test for test in may_be if test[1] != test[2]]
    yield "several", 1, len(failed) or 1, " Or: ".join(_because(*test).text for test in failed)
    yield from failed


def _of_passes(pair: Pair, found: Difference, stepped: Sequence[Values]) -> Iterator[Test]:
    ranks = [min(found.rank, size - 1) for size in pair.sizes]
    passes = [Counter(key[0] for own, key, _ in pair.of(side, "loss") if own == ranks[side]) for side in (0, 1)]
    left, right = (own[found.step] for own in passes)
    yield "number-of-steps", bool(left or stepped[0]), bool(right or stepped[1])
    is_once = any(passes[0][step] == passes[1][step] for step in passes[0])
    if pair.same_size and not (is_once and all(pair.at(found, found.stage))):  # else a result differs first
        yield "number-of-passes", left, right, "this step, but not in all" if is_once else "each step"


def _of_batch(pair: Pair, found: Difference) -> Iterator[Test]:
    step, rank = found.step, found.rank
    read = [[(key[0], own, values[""]) for own, key, values in pair.of(side, "samples")] for side in (0, 1)]
    batch = [values.get("", []) for values in pair.at(found, "samples")]
    yield "overflow", *(not is_finite(values) for values in pair.at(found, "batch"))
    yield "batch-size", *_kinds(pair, found)
    if batch[0] == batch[1]:
        return  # another argument of the forward differs, which the samples do not show
    yield "no-sampler", *(not is_split for is_split in _split(pair, found))
    others = [[samples for at, own, samples in side if at != step and own == rank] for side in read]
    moved = [batch[0] in others[1], batch[1] in others[0]]
    if step == pair.begin:
        yield "sampler-state", *(pair.resumed if all(moved) else moved)
    in_step = [Counter(one for at, _, samples in side if at == step for one in samples) for side in read]
    yield "division", 0, in_step[0] == in_step[1]
    before = [[(own, samples) for at, own, samples in side if at < step] for side in read]
    seen = [{one for _, samples in side for one in samples} for side in before]
    again = [sum(one in seen[side] for one in in_step[side]) / max(1, len(in_step[side])) for side in (0, 1)]
    in_all = [Counter(one for *_, samples in side for one in samples) for side in read]
    # Samples may be in the data several times, augmented at random, or prepared in another way.
    is_known = not in_all[0].keys().isdisjoint(in_step[1]) and not in_all[1].keys().isdisjoint(in_step[0])
    if is_known and min(again) < 0.2 and max(again) > 0.8:
        yield "epoch-end", *again
    yield "set-epoch", *((rank, batch[side]) in before[side] for side in (0, 1))
    ends = sorted({at for side in read for at, *_ in side if at >= step})
    until = ([Counter(one for at, _, samples in side if at <= end for one in samples) for side in read] for end in ends)
    yield "data-order", 0, any(left == right for left, right in until)
    yield "other-data", 0, all(in_all) and in_all[0].keys().isdisjoint(in_all[1])


def _of_numbers(pair: Pair, found: Difference) -> Iterator[Test | None]:
    if not pair.same_size:
        entries = [pair.of(side, "samples", found.step) for side in (0, 1)]
        left, right = (Counter(sample for *_, values in side for sample in values[""]) for side in entries)
        yield "rank-part" if left == right else "global-batch", 0, 1
    if found.stage == "targets":  # of another shape where the loss broadcasts them
        shapes, of_loss = _kinds(pair, found), dataclasses.replace(found, stage="loss")
        yield ("targets", 0, 1) if shapes[0] == shapes[1] else _fact(pair, of_loss)
    factor = _scale(pair, found)
    passes = sum(rank == found.rank for rank, *_ in pair.of(0, "loss", found.step))
    yield "scale", factor, 1, f" by the number of passes, {passes}" * _is_factor(factor, passes)
    yield _fact(pair, found)
    yield "overflow", *(not is_finite(values) for values in pair.at(found, found.stage))


def _scale(pair: Pair, found: Difference) -> float:
    """Return by which factor all losses and gradients of the left are the right's, on each rank; 1 if by none."""
    parts: list[Any] = []
    for rank in range(pair.sizes[0]) if found.stage != "output of the model" else ():
        losses = [numpy.array([values.get("") or 0.0]) for values in pair.at(found, "loss", rank)]
        grads = pair.at(found, "own gradient", rank)
        parts += [[_sketch(values, grads[0]) for values in grads], *([losses] if all(losses) else ())]
    fits = [_fit(left, [right]) for left, right in parts]
    factor = float(fits[0][0][0]) if fits else 1.0
    is_same = all(rest <= 1e-4 and math.isclose(own, factor, rel_tol=1e-4) for (own,), rest in fits)
    return factor if is_same and not math.isclose(factor, 1, rel_tol=1e-4) else 1.0


def _fit(target: Any, columns: Sequence[Any]) -> tuple[Any, float]:
    """Return the factors with which a sum of vectors is nearest to `target`, and which part of it is not in the sum."""
    matrix = numpy.stack(columns, 1)
    if not target.any() or not (numpy.isfinite(target).all() and numpy.isfinite(matrix).all()):
        return numpy.zeros(len(columns)), math.inf
    factors = numpy.linalg.lstsq(matrix, target, rcond=1e-5)[0]
    return factors, float(numpy.linalg.norm(matrix @ factors - target) / numpy.linalg.norm(target))


def _reduction(pair: Pair, found: Difference, side: int, step: int, names: Iterable[str] = ()) -> tuple[Any, ...]:
    """Return by which factors a rank's reduced gradients have those of each rank and pass, and those before.

    The factors are 1 in a mean over the ranks. Return also how much of them is neither, and their norm.
    """
    ranks = pair.sides[side]
    here = ranks[min(found.rank, len(ranks) - 1)]
    reduced, before = (here.get((each, "reduced gradient", 0), {}) for each in (step, step - 1))
    own = [values for *_, values in pair.of(side, "own gradient", step)]
    target, *columns, last = (_sketch(values, names or reduced) for values in (reduced, *own, before))
    # A multiple of the mean first. Any few numbers are a sum of multiples of as many gradients.
    factors, rest = _fit(target, [sum(columns, numpy.zeros_like(last)), last])
    if _LINEAR <= rest < math.inf and numpy.count_nonzero(target) > len(columns) + 1:
        factors, rest = _fit(target, [*columns, last])
    norm = math.hypot(*(value[1] for value in reduced.values()))
    each = numpy.resize(factors[:-1], (len(ranks), -(-len(own) // len(ranks)) or 1)) * len(ranks)
    return each, factors[-1], rest, norm


def _reduced(pair: Pair, found: Difference, side: int) -> str:
    """Return in words how the reduced gradients of a side were made of the ranks' own."""
    steps = sorted({key[0] for _, key, _ in pair.of(side, found.stage) if key[0] >= pair.begin})
    history = [_reduction(pair, found, side, step) for step in steps]
    factors, kept, rest, norm = history[steps.index(found.step)]
    of_name, _, rest_of_name, _ = _reduction(pair, found, side, found.step, [found.name])
    mean, of_all = factors.mean(), [made[0].mean() for made in history]
    clipped = [made[3] for made in history if made[0].mean() < 0.999]
    narrow, split = pair.at(found, found.stage)[side].get(found.name, [None])[-1], _split(pair, found)
    if math.isinf(rest):
        return "infinite or NaN, or made of such" if norm else "zero"
    others = abs(numpy.delete(of_name, found.rank, 0))
    if split[side] > split[1 - side] and rest_of_name < _LINEAR and others.max(0).min() < 1e-2:
        after = [hashes(values) for *_, values in pair.of(side, "weights after the step", found.step)]
        are_equal = all(weights == after[0] for weights in after)
        return f"each rank's own of {found.name}: {'its step is' if are_equal else 'they are not'} reduced"
    is_multiple = rest_of_name < _LINEAR or pair.at(found, found.stage)[side].get(found.name, [0, 1])[1] == 0
    if rest >= _LINEAR and is_multiple and of_name.std() < 1e-2:
        return f"{of_name.mean():.4g} times the mean for {found.name}, but not for all"
    if rest >= _LINEAR:
        unlike = f"something else: a part of {rest:.1e} is no multiple of these"
        return f"rounded to numbers of {narrow}" if narrow and found.size < _WIRE else unlike
    if abs(kept) > 1e-2:
        return f"their mean, and {kept:.4g} times those of the step before"
    if not numpy.allclose(factors, mean, rtol=1e-2):
        of_passes = numpy.allclose(factors, factors[0], atol=1e-2 * abs(factors).max())
        parts = factors.T if of_passes else factors
        shown = ", ".join(f"{round(float(abs(own).mean()), 3):g}" for own in parts)
        return f"a mean in which the {'passes' if of_passes else 'ranks'} have the factors {shown}"
    if mean < 0.999 and len(clipped) > 1 and numpy.allclose(clipped, norm, rtol=1e-3):
        return f"their mean, clipped to the norm {norm:.4g}"
    known = {1: "their mean", len(factors): "their sum"}
    names = [known[factor] for factor in known if math.isclose(mean, factor, rel_tol=1e-4)]
    in_each = " in each step" * (len(steps) > 1 and numpy.allclose(of_all, mean, rtol=1e-3))
    return [*names, f"{mean:.6g} times their mean"][0] + in_each


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
    "output of the model": "data or numbers that the forward uses besides its arguments, code without an operation "
    "that has a gradient, or equal operations that are joined otherwise",
    "targets": "what prepares the targets",
    "loss": "how the loss is made of the outputs: its function, targets and weights",
    "own gradient": "the backward: hooks on gradients, where they stop, and what it computes again",
    "reduced gradient": "what changes gradients between the backward and the step",
    "batch": "how samples are drawn (lengths and seeds of epochs, random augmentation) and changed, other arguments "
    "and forwards",
    "weights after the step": "the code of the optimizer's step, and its hooks",
    "buffers after the step": "what changes buffers besides the forward",
}
"""What may differ if nothing that is recorded does."""
_CAUSES = """
rounding: Only rounding: the differences are at first not larger than a reordered sum makes them, and grow slowly.
rounding-jump: Only rounding: it has changed the sign of single numbers, where ReLU or pooling take another branch.
    Nothing is wrong. Compare fewer steps, or pass a larger --tolerance.
unknown: {by} Excluded, because equal up to rounding: {left}. What is left: {right}.
    Compare this part of the script on both sides, then the environments: variables and versions.
several: What was recorded does not tell apart: {by}
    Make these equal one after the other.
early-step: On the {side}, the optimizer made a step before any backward, as Horovod's broadcast_optimizer_state does.
    Use dualdist's broadcast_optimizer_state, or broadcast the parameters after the optimizer's state.
parameters: The {by} differ: {name} is {left} on the left and {right} on the right.
    Compare the code that makes the model: sizes, shared weights, and what the optimizer is given.
no-broadcast: On the {side}, the ranks begin with different weights: they were not broadcast, or changed later.
    Call broadcast_parameters(model.state_dict(), root_rank=0), or use DistributedDataParallel.
no-broadcast-of-buffers: On the {side}, the ranks have different buffers: they were not broadcast.
    Broadcast model.state_dict(), which has the buffers, or pass broadcast_buffers=True.
initial-values: The sides begin with other values: a seed, checkpoint, root of the broadcast, release, or other code.
    Set the seed before the model is made, or load the same checkpoint, and broadcast from the same rank.
set-epoch: The {side} repeats batches that it has seen, the other side does not: all its epochs have the same order.
    Call sampler.set_epoch(epoch) before each epoch.
no-sampler: On the {side}, all ranks read the same batch: the data is not divided among them.
    Give the DataLoader a DistributedSampler with the rank and the number of ranks.
epoch-end: After equal batches, the {side} reads samples again, the other side does not: it begins an epoch.
batch-size: Of the batch, {name} is {left} on the left and {right} on the right.
    Compare batch sizes, drop_last, the length of the data, and what prepares it.
sampler-state: The {side} begins with a batch of another step of the other side: one has resumed, or skips some.
    Restore the sampler's epoch and place with the weights. If the weights were not restored, pass --start-step.
division: In this step both sides read the same samples, but in another order, or on other ranks or in other passes.
data-order: Both sides read the same samples in another order: other seeds or samplers, lengths, or order of data.
    Give the sampler the same seed, rank and number of ranks on both sides.
other-data: Neither side reads a sample of the other: data, what prepares it, or the part that is read differs.
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
class: The {by} is {left} on the left and {right} on the right.
    Give layers the same arguments, train() or eval(), autocast and requires_grad_() on both sides.
random-numbers: The random generator of {right}, which the forward uses, is in another state.
    Seed it in the same way on both sides, for example with seed_everything(seed, rank_offset=True).
operation: An operation of the forward or loss is {left} on the left and {right} on the right.
operations: Of the forward and loss, the left records {left} for a gradient, where the right records {right}.
    Compare the loss function, its scale, and the code of the forward, also detach() and no_grad().
scale: The loss of the left is {left:.6g} times that of the right, and so are all gradients: it is scaled{by}.
    Compare the scale of the loss: GradScaler, weights, `reduction`, or a division by passes or samples.
other-optimizer: In this step, only the optimizer of the left has {left}, and only that of the right {right}.
    Compare how often each optimizer makes a step.
number-of-passes: The left makes {left} backward passes in {by}, and the right {right}.
    Accumulate over the same number of passes on both sides, and skip the same steps.
number-of-steps: After {found.step} steps one side ends: other lengths of the data, or a step that a GradScaler skipped.
    Compare drop_last, and the numbers of batches and epochs.
reduction: Of the ranks' own gradients, the reduced ones are {left} on the left, and {right} on the right.
    Compare what is reduced, op, compression, factors, clipping, zero_grad(), no_sync(), and hooks on gradients.
settings: {name} is {left} on the left and {right} on the right{by}.
    Set the same value on both sides; after equal steps, compare how often schedulers step, or what was restored.
optimizer-state: After equal steps, {name} of the optimizer differs: it was not broadcast, not restored, or changed.
    Broadcast or load the optimizer's state on both sides, or on none.
outside: On the {side}, the weights were changed between the steps, and not by the optimizer.
    Compare what changes weights: moving averages, limits, a checkpoint or a broadcast.
"""
"""Of each cause the kind, why, and in the next indented line what to do."""
