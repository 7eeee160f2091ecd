"""Why two trainings differ: the comparison of `dualdist parity`, with records that are written by hand."""

from __future__ import annotations

import copy
import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dualdist.cli import main
from dualdist.errors import ConfigurationError
from dualdist.parity.command import parse_cell
from dualdist.parity.comparison import _CAUSES, compare
from dualdist.parity.recorder import Recorder, _operations, fingerprint
from dualdist.parity.records import COMPARED, difference

WEIGHTS, BUFFERS, OUTSIDE, BATCH, OUTPUT, TARGETS, LOSS, OWN, *IN_STEP = COMPARED
REDUCED, SETTINGS, STATE, NEW_WEIGHTS, NEW_BUFFERS = IN_STEP
EARLY, SAMPLES, LAYERS, RANDOM = "weights before an early step", "samples", "layers", "random states"
OPERATIONS, BRANCHES, COLLECTIVE, CALLS = "operations", "branches", "collective", "calls"
STEPS, PASSES = 4, 2
Record = dict[str, Any]
Fault = Callable[[Record], None]


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(40, generator=torch.Generator().manual_seed(seed))


@functools.cache
def values(seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Return the fingerprint of a tensor."""
    return fingerprint((numbers(seed) * scale).to(dtype), True)


def call(given: int, returned: int) -> list[Any]:
    """Return what a layer was given and has returned."""
    return [[values(given)], [values(returned)]]


def own(step: int, number: int, rank: int) -> torch.Tensor:
    """Return the gradient of a pass on a rank."""
    return numbers(1005 + 100 * step + 10 * number + rank)


def reduced(step: int, factors: Sequence[float] = (1, 1), kept: float = 0.0) -> list[Any]:
    """Return the gradient that ranks apply: the mean with a factor for each rank, and a part of the step before."""
    parts = [own(step, number, rank) * factors[rank] for number in range(PASSES) for rank in range(2)]
    parts += [own(step - 1, number, rank) * kept for number in range(PASSES) for rank in range(2)]
    return fingerprint(sum(parts) / 2, True)  # type: ignore[arg-type]


def sampled(step: int, number: int, rank: int, names: str = "ab") -> list[str]:
    """Return the samples of a batch. Two steps are an epoch, and each epoch has another order."""
    return [f"{(100 * step + 10 * number + rank) % 200}{name}" for name in names[:: -1 if step // 2 else 1]]


def record(size: int = 2) -> Record:
    """Return a record with one tensor of each kind."""
    ranks = []
    for rank in range(size):
        entries: list[Any] = [[-1, WEIGHTS, 0, {"w": values(1)}], [-1, BUFFERS, 0, {"norm.mean": values(2)}]]
        for step in range(STEPS):
            for number in range(PASSES):
                key = 1000 + 100 * step + 10 * number + rank
                entries += [
                    [step, BATCH, number, {"input.0": values(key)}],
                    [step, SAMPLES, number, {"": sampled(step, number, rank)}],
                    [step, LAYERS, number, {"": "float32", "first": "Linear()", "norm": "BatchNorm(momentum=0.1)"}],
                    [step, CALLS, number, {"first": call(key, key + 6), "norm": call(key + 6, key + 7)}],
                    [step, OUTPUT, number, {"": values(key + 7)}],
                    [step, OPERATIONS, number, {"": [["Div", {"other": 2.0}], ["", {}], ["Relu", {}]]}],
                    [step, BRANCHES, number, {"2:Relu": fingerprint(numbers(key) > 0)}],
                    [step, TARGETS, number, {"Nll": values(key + 8)}],
                    [step, RANDOM, number, {"torch": [f"{key}", True], "python": [f"{key}", False]}],
                    [step, LOSS, number, {"": 1.0 + key}],
                    [step, OWN, number, {"w": fingerprint(own(step, number, rank))}],
                ]
            entries += [
                [step, REDUCED, 0, {"w": reduced(step)}],
                [step, SETTINGS, 0, {"betas of group 0": "(0.9, 0.999)", "lr of group 0": 0.1}],
                [step, STATE, 0, {"momentum of w": values(5000 + step)}],
                [step, NEW_WEIGHTS, 0, {"w": values(3000 + step)}],
                [step, NEW_BUFFERS, 0, {"norm.mean": values(4000 + step)}],
            ]
        head = {"summing_error": 1e-7, "threads": 1, "torch": "2.15", "device": "cpu"}
        ranks.append(head | {"rank": rank, "values": entries, "steps": STEPS})
    return {"cell": "cell", "steps": 100, "seconds": 1.0, "warnings": [], "ranks": ranks, "format": 4}


def put(changed: Record, step: int, stage: str, value: Any, rank: int | None = None, number: int = 0) -> None:
    """Replace the only value of an entry, on one rank or on all."""
    for made in changed["ranks"] if rank is None else changed["ranks"][rank : rank + 1]:
        entry = next(entry for entry in made["values"] if entry[:3] == [step, stage, number])
        entry[3] |= {list(entry[3])[-1]: value}


def set_all(changed: Record, **values: Any) -> None:
    for rank in changed["ranks"]:
        rank.update(values)


def drop(changed: Record, is_gone: Callable[[list[Any]], bool]) -> None:
    for rank in changed["ranks"]:
        rank["values"] = [entry for entry in rank["values"] if not is_gone(entry)]


def putting(step: int, stage: str, value: Any, rank: int | None = None) -> Fault:
    return lambda changed: put(changed, step, stage, value, rank)


def all_of(*faults: Fault) -> Fault:
    def plant(changed: Record) -> None:
        for fault in faults:
            fault(changed)

    return plant


def every(stage: str, value: Callable[[int, int, int], Any], first: int = 0) -> Fault:
    """Return what replaces the last value of each entry of a stage, from step `first` on: value(step, number, rank)."""

    def plant(changed: Record) -> None:
        for rank, made in enumerate(changed["ranks"]):
            for step, entry_stage, number, entry in made["values"]:
                if entry_stage == stage and step >= first:
                    entry[list(entry)[-1]] = value(step, number, rank)

    return plant


def adding(step: int, stage: str, value: Any) -> Fault:
    def plant(changed: Record) -> None:
        for rank in changed["ranks"]:
            rank["values"].append([step, stage, 0, {"w": value}])

    return plant


def fewer(step: int, first: int) -> Fault:
    """Return what drops the entries of a step from its pass `first` on."""
    return lambda made: drop(made, lambda entry: entry[0] == step and entry[2] >= first)


def scaled(factor: float) -> Fault:
    """Return what multiplies all losses, and with them the gradients."""
    losses = every(LOSS, lambda step, number, rank: factor * (1001 + 100 * step + 10 * number + rank))
    grads = every(OWN, lambda step, number, rank: fingerprint(own(step, number, rank) * factor))
    return all_of(losses, grads, every(REDUCED, lambda step, *_: reduced(step, (factor, factor))))


def factors(*given: float, first: int = 0) -> Fault:
    return every(REDUCED, lambda step, *_: reduced(step, given), first)


def clipped(step: int, *_: int) -> list[Any]:
    """Return the reduced gradient, clipped to the norm 2."""
    norm = reduced(step)[1]
    return reduced(step, (2 / norm, 2 / norm))


def without_zero_grad(step: int, *_: int) -> list[Any]:
    return reduced(step, kept=float(step == 1))


def other_generators(changed: Record) -> None:
    """No generator of Python is seeded, and that of torch, which the forward uses, differs from step 2 on."""
    for step, stage, _, states in changed["ranks"][1]["values"]:
        if stage == RANDOM:
            states["python"] = ["not used, and different everywhere", False]
            states["torch"] = ["different", True] if step >= 2 else states["torch"]
    put(changed, 2, OUTPUT, values(6), 1)


def changing(stage: str, change: Callable[[dict[str, Any]], Any], step: int | None = None) -> Fault:
    """Return what changes the entries of a stage, in a step or in all."""

    def plant(changed: Record) -> None:
        for rank in changed["ranks"]:
            for at, entry_stage, _, entry in rank["values"]:
                if entry_stage == stage and step in (None, at):
                    change(entry)

    return plant


def layers(**made: str) -> Fault:
    return changing(LAYERS, lambda entry: entry.update(made))


def output(norm: list[Any], **calls: list[Any]) -> Fault:
    """Return what changes the first output of rank 0, and what its layer `norm` was given and has returned."""

    def plant(changed: Record) -> None:
        put(changed, 0, OUTPUT, W9, 0)
        next(entry for entry in changed["ranks"][0]["values"] if entry[:3] == [0, CALLS, 0])[3].update(calls, norm=norm)

    return plant


def reads(step: int, batch: int, samples: int) -> Fault:
    """Return what lets each rank read another batch in a step, with samples that it has read as another batch."""

    def plant(changed: Record) -> None:
        for rank in range(2):
            put(changed, step, BATCH, values(batch + rank), rank)
            put(changed, step, SAMPLES, [f"{samples + rank}a", f"{samples + rank}b"], rank)

    return plant


def own_sum(step: int, rank: int) -> torch.Tensor:
    return own(step, 0, rank) + own(step, 1, rank)


def overflow(changed: Record) -> None:
    put(changed, 2, OWN, values(5, math.inf), 1, number=1)
    put(changed, 2, REDUCED, values(5, math.inf))


W9, MEAN = values(9), (own_sum(1, 0) + own_sum(1, 1)) / 2
FAULTS: dict[str, tuple[Fault, int, int, str, str]] = {
    "learning rate": (every(SETTINGS, lambda *_: 0.2), 0, 0, SETTINGS, "settings: number of processes"),
    "betas": (
        changing(SETTINGS, lambda entry: entry.update({"betas of group 0": "(0.9, 0.99)"}), 2),
        *(2, 0, SETTINGS, "settings"),
    ),
    "early step": (
        all_of(putting(-1, WEIGHTS, values(1, 1 - 1e-7)), adding(-1, EARLY, values(1))),
        *(-1, 0, WEIGHTS, "early-step"),
    ),
    "early step and seed": (
        all_of(putting(-1, WEIGHTS, W9), adding(-1, EARLY, values(8))),
        *(-1, 0, WEIGHTS, "several"),
    ),
    # As of Adam, of which a step with gradients of zero changes the state alone.
    "early state": (all_of(putting(0, STATE, W9), adding(-1, EARLY, values(1))), 0, 0, STATE, "early-step"),
    "seed of the model": (all_of(putting(-1, WEIGHTS, W9), adding(-1, EARLY, W9)), -1, 0, WEIGHTS, "initial-values"),
    "shape": (putting(-1, WEIGHTS, fingerprint(torch.ones(3))), -1, 0, WEIGHTS, "parameters"),
    "parameters": (putting(-1, WEIGHTS, W9, 1), -1, 1, WEIGHTS, "no-broadcast"),
    "track_running_stats": (changing(BUFFERS, dict.clear), -1, 0, BUFFERS, "parameters: buffers differ: norm.mean is "),
    "a second step": (
        lambda changed: drop(changed, lambda entry: entry[0] == 1 and entry[1] not in IN_STEP),
        *(1, 0, BATCH, "number-of-passes: in this step, but not in all"),
    ),
    "SyncBatchNorm": (
        all_of(every(LAYERS, lambda *_: "SyncBatchNorm() in training"), output(call(1006, 9))),
        *(0, 0, OUTPUT, "layer: The layer norm is "),
    ),
    "eval()": (
        all_of(layers(first="Linear(p=0.1)", norm="BatchNorm(momentum=0.1) in evaluation"), output(call(1006, 9))),
        *(0, 0, OUTPUT, "layer: The layer norm is "),
    ),
    "activation": (all_of(layers(norm="GELU()"), output(call(1006, 9))), 0, 0, OUTPUT, "class: GELU()"),
    "one layer more": (
        all_of(layers(more="Tanh()"), output(call(1006, 1007), more=call(1007, 9))),
        *(0, 0, OUTPUT, "class: The layer more is "),
    ),
    "an unused layer and an offset in the forward": (
        all_of(layers(unused="Dropout(p=0.1)"), output(call(8, 9))),
        *(0, 0, OUTPUT, "unknown"),
    ),
    "a layer without an effect and an offset in the forward": (
        all_of(layers(first="Linear(p=0.1)"), output(call(8, 9))),
        *(0, 0, OUTPUT, "unknown"),
    ),
    "a layer after an offset in the forward": (
        all_of(layers(norm="BatchNorm(momentum=0.2)"), output(call(8, 9))),
        *(0, 0, OUTPUT, "unknown: initial weights, batch, operations"),
    ),
    "frozen parameter": (
        all_of(layers(**{"": "float32 with w frozen"}), changing(OWN, lambda entry: entry.pop("w"))),
        *(0, 0, OWN, "layer: The model is "),
    ),
    "a hook on gradients": (all_of(layers(norm="BatchNorm(momentum=0.2)"), putting(0, OWN, W9)), 0, 0, OWN, "unknown"),
    "a step of another optimizer": (
        all_of(changing(NEW_WEIGHTS, lambda entry: entry.update(v=entry.pop("w")), 2), reads(2, 17, 0)),
        *(2, 0, BATCH, "other-optimizer"),
    ),
    "momentum of BatchNorm": (
        all_of(every(LAYERS, lambda *_: "BatchNorm(momentum=0.2) in training"), putting(0, NEW_BUFFERS, W9)),
        *(0, 0, NEW_BUFFERS, "layer"),
    ),
    "dropout": (other_generators, 2, 1, OUTPUT, "random-numbers"),
    "seed of the sampler": (all_of(reads(0, 17, 100), reads(1, 27, 0)), *(0, 0, BATCH, "data-order")),
    "augmentation": (all_of(reads(0, 17, 0), every(SAMPLES, lambda *_: ["x"])), 0, 0, BATCH, "other-data"),
    "other ranks": (
        all_of(putting(0, BATCH, W9, 1), *(putting(0, SAMPLES, sampled(0, 0, 1 - rank), rank) for rank in (0, 1))),
        *(0, 1, BATCH, "division"),
    ),
    "set_epoch": (reads(2, 1000, 100), 2, 0, BATCH, "set-epoch"),
    "drop_last": (
        all_of(reads(1, 17, 0), every(SAMPLES, lambda step, number, rank: sampled(step - 1, number, rank), 1)),
        *(1, 0, BATCH, "epoch-end"),
    ),
    "samples prepared in another way": (
        all_of(
            putting(2, BATCH, W9, 0), every(SAMPLES, lambda step, number, rank: sampled(step, number, rank, "xy"), 2)
        ),
        *(2, 0, BATCH, "unknown"),
    ),
    "batch size": (putting(0, BATCH, fingerprint(torch.ones(20))), 0, 0, BATCH, "batch-size"),
    "no sampler": (
        all_of(putting(0, BATCH, values(1000)), putting(0, SAMPLES, ["0a", "0b"])),
        *(0, 1, BATCH, "no-sampler"),
    ),
    "NaN in a batch": (putting(2, BATCH, values(5, math.nan), 1), 2, 1, BATCH, "overflow"),
    "targets": (putting(1, TARGETS, W9), 1, 0, TARGETS, "targets"),
    "broadcast targets": (
        all_of(
            every(OPERATIONS, lambda *_: [["Mse", {}], ["", {}], ["Relu", {}]]),
            putting(0, TARGETS, fingerprint(torch.ones(20))),
        ),
        *(0, 0, TARGETS, "operations"),
    ),
    "loss": (
        all_of(every(OPERATIONS, lambda *_: [["Mse", {}], ["", {}], ["Relu", {}]]), putting(0, LOSS, 7.0)),
        *(0, 0, LOSS, "operations"),
    ),
    "temperature": (
        all_of(every(OPERATIONS, lambda *_: [["Div", {"other": 3.0}], ["", {}], ["Relu", {}]]), putting(0, LOSS, 7.0)),
        *(0, 0, LOSS, "operation"),
    ),
    "accumulation": (scaled(2.0), 0, 0, LOSS, "scale: number of passes"),
    "GradScaler": (scaled(1024.0), 0, 0, LOSS, "scale"),
    "overflow": (overflow, 2, 1, OWN, "overflow"),
    "sum": (factors(2, 2), 0, 0, REDUCED, "reduction: their sum in each step"),
    "prescale": (factors(0.5, 0.5), 0, 0, REDUCED, "reduction: 0.5 times their mean in each step"),
    "clipping": (every(REDUCED, clipped), 0, 0, REDUCED, "reduction: clipped to the norm 2"),
    "clipping before the reduction": (factors(0.3, 0.8), 0, 0, REDUCED, "reduction: the factors 0.3, 0.8"),
    "a rank left out": (factors(2, 0, first=1), 1, 0, REDUCED, "reduction: the factors 2, 0"),
    "zero_grad after each pass": (
        every(REDUCED, lambda step, *_: fingerprint((own(step, 1, 0) + own(step, 1, 1)) / 2, True)),
        *(0, 0, REDUCED, "reduction: the passes have the factors 0, 1"),
    ),
    "no zero_grad": (
        every(REDUCED, without_zero_grad),
        1,
        0,
        REDUCED,
        "reduction: and 1 times those of the step before",
    ),
    "wire": (
        putting(1, REDUCED, fingerprint(MEAN.half().float(), True)),
        1,
        0,
        REDUCED,
        "reduction: rounded to numbers of float16",
    ),
    "clipped values": (
        putting(1, REDUCED, fingerprint(MEAN.clamp(-1, 1), True)),
        1,
        0,
        REDUCED,
        "reduction: is no multiple of these",
    ),
    "no reduction": (
        all_of(putting(1, REDUCED, fingerprint(own_sum(1, 1), True), 1), putting(1, NEW_WEIGHTS, W9, 1)),
        *(1, 1, REDUCED, "reduction: own of w: they are not reduced"),
    ),
    "a gradient of zero": (
        putting(1, REDUCED, fingerprint(torch.zeros(40)), 1),
        *(1, 1, REDUCED, "reduction: zero on the "),
    ),
    "Adasum": (
        putting(1, REDUCED, fingerprint(own_sum(1, 1), True), 1),
        *(1, 1, REDUCED, "reduction: own of w: its step is reduced"),
    ),
    "fewer steps": (fewer(3, 0), 3, 0, BATCH, "number-of-steps"),
    "fewer passes": (fewer(3, 1), 3, 0, BATCH, "number-of-passes"),
    "momentum": (putting(1, STATE, W9), 1, 0, STATE, "optimizer-state"),
    "average of weights": (adding(2, OUTSIDE, W9), 2, 0, OUTSIDE, "outside"),
    "buffers": (putting(3, NEW_BUFFERS, W9, 1), 3, 1, NEW_BUFFERS, "no-broadcast-of-buffers"),
    # What was recorded does not show these. An operation of the loss does not explain an output.
    "forward and loss": (
        all_of(every(OPERATIONS, lambda *_: [["", {}], ["Relu", {}]]), putting(0, OUTPUT, W9)),
        *(0, 0, OUTPUT, "unknown"),
    ),
    "forward": (putting(1, OUTPUT, W9), 1, 0, OUTPUT, "unknown"),
    "another argument of the forward": (putting(1, BATCH, W9), 1, 0, BATCH, "unknown: other arguments"),
    "augmentation of half of the samples": (
        all_of(putting(0, BATCH, W9, 0), every(SAMPLES, lambda step, number, rank: sampled(step, number, rank, "xb"))),
        *(0, 0, BATCH, "unknown"),
    ),
    "augmentation of one batch": (
        all_of(putting(2, BATCH, W9, 0), putting(2, SAMPLES, sampled(2, 0, 0, "xy"), 0)),
        *(2, 0, BATCH, "unknown"),
    ),
    "one loss": (putting(1, LOSS, 2202.0), 1, 0, LOSS, "unknown"),
    "backward": (putting(1, OWN, W9), 1, 0, OWN, "unknown"),
    "scaled once": (factors(0.5, 0.5, first=3), 3, 0, REDUCED, "reduction: 0.5 times their mean on"),
    "step": (putting(1, NEW_WEIGHTS, W9), 1, 0, NEW_WEIGHTS, "unknown"),
    "a layer of another class without an effect": (
        all_of(every(LAYERS, lambda *_: "Norm() in training"), putting(2, OUTPUT, W9)),
        *(2, 0, OUTPUT, "unknown"),
    ),
}


@pytest.mark.parametrize("is_left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_is_found_where_it_begins_and_named(name: str, is_left: bool) -> None:
    plant, step, rank, stage, kind = FAULTS[name]
    clean, faulty = record(), record()
    plant(faulty)
    result = compare(*((faulty, clean) if is_left else (clean, faulty)), 1e-4)
    assert result.first is not None and result.cause is not None
    assert (result.first.step, result.first.rank, result.first.stage) == (step, rank, stage)
    kind, _, words = kind.partition(": ")
    assert result.cause.kind == kind and words in result.cause.text, result.cause.text
    # In both directions, the faulty side is the one that is named, except where the other side is.
    if "{side}" in _CAUSES.partition(f"\n{kind}: ")[2].partition("\n")[0]:
        assert ("left" if is_left else "right") in result.cause.text


def test_the_text_for_an_unknown_cause_says_what_is_excluded() -> None:
    other = record()
    put(other, 1, OUTPUT, W9)
    cause = compare(record(), other, 1e-4).cause
    assert cause is not None and "initial weights, batch, layers, operations (with" in cause.text


def test_a_cause_that_may_hide_a_second_one_says_so_and_what_is_excluded() -> None:
    """As another seed of dropout before an offset in the forward of a layer, which no record shows."""
    for name in ("dropout", "eval()", "activation", "temperature", "overflow", "momentum of BatchNorm"):
        other = record()
        FAULTS[name][0](other)
        cause = compare(record(), other, 1e-4).cause
        assert cause is not None and cause.kind != "unknown"
        words = " This may hide a second cause. Excluded, because equal up to rounding: initial weights, batch, "
        excluded, _, left = cause.text.partition(words)[2].partition(" What is left: ")
        assert excluded and left and ("random" in excluded) == (name not in ("dropout", "momentum of BatchNorm"))
        assert name != "dropout" or left.startswith("data or numbers that the forward uses besides its arguments")


def test_the_order_of_an_optimizers_parameters_is_no_cause() -> None:
    left, right = record(), record()
    changing(NEW_WEIGHTS, lambda entry: entry.update(v=W9))(left)
    changing(NEW_WEIGHTS, lambda entry: entry.update(v=W9, w=entry.pop("w")))(right)
    every(SETTINGS, lambda *_: 0.2)(right)
    cause = compare(left, right, 1e-4).cause
    assert cause is not None and cause.kind == "settings"


def test_what_was_not_recorded_is_not_excluded() -> None:
    left, right = record(), record()
    for made in (left, right):  # as of functions of tensors, without a forward of a module
        drop(made, lambda entry: entry[1] in (BATCH, SAMPLES, LAYERS, OUTPUT, RANDOM))
    put(right, 1, LOSS, 7.0)
    cause = compare(left, right, 1e-4).cause
    assert cause is not None and "initial weights, targets, operations (with" in cause.text
    assert "autograd keeps). What is left: how samples are drawn" in cause.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_number_that_rounds_to_another_one_of_16_bits_is_rounding(dtype: str) -> None:
    """Of 40 numbers, one of bfloat16 that changes by its last bit changes the norm by 2**-8 / 40**0.5 or so."""
    left, right = record(), record()
    for made in (left, right):
        changing(LAYERS, lambda entry: entry.update(first=f"Linear() {dtype}"))(made)
    put(right, 0, LOSS, 1001 * (1 + 1e-8), 0)
    flipped = own(1, 0, 0)
    flipped[7] *= 1 + 2**-8
    put(right, 1, OWN, fingerprint(flipped), 0)
    result = compare(left, right, 1.0)
    assert (result.first is None) == (dtype == "bfloat16"), result


def test_of_other_operations_those_are_named_that_a_side_has_more_often() -> None:
    names = ["Mean", "", "Add", "Mul", "Tanh", "Mul", "Linear"]
    for changed, text in (
        (
            [*names[:3], "Mul", "Gelu", *names[3:]],
            "records nothing for a gradient, where the right records Mul(), Gelu().",
        ),
        (
            [*names[:2], "Relu", *names[5:]],
            "records Tanh(), Mul(), Add() for a gradient, where the right records Relu().",
        ),
        (
            [*names[:3], "Tanh", "Mul", *names[5:]],
            "records Tanh(), Mul() for a gradient, where the right records Mul(), Tanh().",
        ),
    ):
        sides = record(), record()
        for made, operations in zip(sides, (names, changed), strict=True):
            every(OPERATIONS, lambda *_, shown=operations: [[name, {}] for name in shown])(made)
        put(sides[1], 0, OWN, W9)
        cause = compare(*sides, 0.0).cause
        assert cause is not None and cause.kind == "operations"
        assert cause.text.startswith("Of the forward and loss, the left " + text), cause.text


def test_a_gradient_that_is_zero_is_no_multiple_of_the_others() -> None:
    left, right = record(), record()
    for made in (left, right):
        changing(OWN, lambda entry: entry.update(v=values(7)))(made)
        changing(REDUCED, lambda entry: entry.update(v=values(7, 2.0)))(made)
    every(REDUCED, lambda *_: fingerprint(torch.zeros(40), True))(right)
    cause = compare(left, right, 0.0).cause
    assert cause is not None and "and 0 times the mean for v, but not for all on the right." in cause.text


def test_of_a_few_numbers_no_factors_of_ranks_are_named() -> None:
    """Any two numbers are a sum of multiples of two gradients."""
    for factors, words in (((1.0, 1.0), "their sum"), ((0.5, 1.0), "something else")):
        left, right = record(), record()
        for made, factor in ((left, (0.5, 0.5)), (right, factors)):
            for step in range(STEPS):
                grads = [[own(step, number, rank)[:2] for number in range(PASSES)] for rank in range(2)]
                total = sum((torch.stack(grads[rank]).sum(0) * factor[rank] for rank in range(2)), torch.zeros(2))
                for rank in range(2):
                    put(made, step, REDUCED, fingerprint(total), rank)
                    for number in range(PASSES):
                        put(made, step, OWN, fingerprint(grads[rank][number]), rank, number)
        cause = compare(left, right, 1e-4).cause
        assert cause is not None and words in cause.text and "their mean in each step on the left" in cause.text


def test_a_rate_that_differs_later_is_not_said_to_be_scaled_by_the_number_of_processes() -> None:
    for first, is_said in ((0, True), (1, False)):
        other = record()
        every(SETTINGS, lambda *_: 0.2, first)(other)
        cause = compare(record(), other, 1e-4).cause
        assert cause is not None and ("number of processes" in cause.text) == is_said


def test_equal_records_are_equal() -> None:
    result = compare(record(), record(), 0.0)
    assert (result.first, result.cause, result.least, result.notes) == (None, None, None, [])
    assert result.losses == [[1006.5 + 100 * step] * 2 for step in range(STEPS)]


def near(value: torch.Tensor, size: float) -> list[Any]:
    """Return the fingerprint of a tensor that differs by a part of another one, which is no multiple of it."""
    return fingerprint(value + size * numbers(99), True)


def test_rounding_is_no_difference_and_is_named_where_it_passes_the_tolerance() -> None:
    other = record()
    put(other, 1, OWN, near(own(1, 0, 0), 2e-7), 0)
    put(other, 1, NEW_WEIGHTS, near(numbers(3001), 2e-7), 0)
    set_all(other, threads=8)
    result = compare(record(), other, 1e-4)
    assert result.first is None and result.cause is None
    assert result.least is not None and (result.least.step, result.least.stage) == (1, OWN)
    assert 1e-7 < result.largest < 1e-6
    assert "threads 1 and right 8" in result.notes[0]
    put(other, 2, OUTPUT, near(numbers(1207), 5e-6), 0)
    put(other, 3, OUTPUT, near(numbers(1307), 1.3e-4), 0)
    result = compare(record(), other, 1e-4)
    assert result.first is None and result.largest > 1e-4
    assert result.cause is not None and result.cause.kind == "rounding"


@pytest.mark.parametrize("stage", [WEIGHTS, BUFFERS, BATCH, SETTINGS])
def test_a_difference_where_nothing_is_summed_is_no_rounding(stage: str) -> None:
    left, right = record(), record()
    for made, factor in ((left, 1.0), (right, 1 + 1e-7)):
        step = -1 if stage in (WEIGHTS, BUFFERS) else 1
        put(made, step, stage, 0.1 * factor if stage == SETTINGS else values(1, factor))
    result = compare(left, right, 1e-4)
    assert result.first is not None and result.first.stage == stage


def test_an_argument_that_is_computed_with_the_weights_may_have_rounding() -> None:
    """As a hidden state, or the output of another model."""
    for size, is_rounding in ((2e-7, True), (1e-2, False)):
        other = record()
        put(other, 1, OWN, near(own(1, 0, 0), 2e-7), 0)
        put(other, 2, BATCH, near(numbers(1200), size), 0)
        assert (compare(record(), other, 1e-4).first is None) == is_rounding


def test_releases_of_torch_may_show_other_arguments_and_settings() -> None:
    other = record()
    every(LAYERS, lambda *_: "BatchNorm(momentum=0.1, bias=True)")(other)
    for rank in other["ranks"]:
        for entry in rank["values"]:
            if entry[1] == SETTINGS:
                entry[3]["new of group 0"] = False
    put(other, 0, OUTPUT, near(numbers(1007), 2e-7), 0)
    put(other, 0, CALLS, [[values(1006)], [near(numbers(1007), 2e-7)]], 0)
    assert compare(record(), other, 1e-4).first is not None
    set_all(other, torch="2.16")
    assert compare(record(), other, 1e-4).first is None


def test_a_jump_that_no_rounding_explains_is_a_difference() -> None:
    for step, size in ((1, 1e-4), (2, 1e-2)):  # at once, and much more than before
        other = record()
        put(other, 1, OUTPUT, near(numbers(1107), 2e-7), 0)
        put(other, step, OUTPUT, near(numbers(1007 + 100 * step), size), 0)
        first = compare(record(), other, 1e-4).first
        assert first is not None and first.step == step


def test_a_gradient_that_jumps_is_rounding_only_where_a_branch_has_changed() -> None:
    """As where an activation changes its sign."""
    other = record()
    put(other, 1, OUTPUT, near(numbers(1107), 2e-7), 0)
    put(other, 1, OWN, near(own(1, 0, 0), 1e-2), 0)
    cause = compare(record(), other, 1e-4).cause
    assert cause is not None and cause.kind == "unknown"
    signs = numbers(1100) > 0
    signs[3] ^= True
    put(other, 1, BRANCHES, fingerprint(signs), 0)
    result = compare(record(), other, 1e-4)
    assert result.first is None and result.cause is not None and result.cause.kind == "rounding-jump"


@pytest.mark.parametrize("size", [0.0, 1e-6])
def test_a_reduced_gradient_does_not_jump_where_the_own_gradients_do_not(size: float) -> None:
    other = record()
    put(other, 1, OWN, near(own(1, 0, 0), size), 0)
    put(other, 1, OUTPUT, near(numbers(1107), 2e-7), 0)
    signs = numbers(1100) > 0
    signs[3] ^= True
    put(other, 1, BRANCHES, fingerprint(signs), 0)
    put(other, 1, REDUCED, reduced(1, (1.01, 1)))
    first = compare(record(), other, 1e-4).first
    assert first is not None and first.stage == REDUCED


def test_a_layer_whose_weight_is_used_without_a_call_is_the_same_layer() -> None:
    left, right = record(), record()
    for made, shown in ((left, "Linear() float32 with bias frozen"), (right, "Linear()  with bias frozen")):
        for entry in (entry for rank in made["ranks"] for entry in rank["values"]):
            if entry[1] == LAYERS:
                entry[3]["first"] = shown
            if entry[1] == CALLS and made is right:
                del entry[3]["first"]
    put(right, 0, OUTPUT, near(numbers(1007), 2e-7), 0)
    assert compare(left, right, 1e-4).first is None
    for rank in right["ranks"]:
        for entry in (entry for entry in rank["values"] if entry[1] == LAYERS):
            entry[3]["first"] = "Linear(bias=False)  with bias frozen"
    cause = compare(left, right, 1e-4).cause
    assert cause is not None and "layer first is Linear()" in cause.text


def test_weights_whose_gradients_are_rounding_stay_out() -> None:
    """As Adam moves the bias before a batch norm."""
    left, right = record(), record()
    for made, seed in ((left, 1), (right, 2)):
        for rank in made["ranks"]:
            for _, stage, _, entry in rank["values"]:
                if stage in (OWN, REDUCED):
                    entry["bias"] = values(seed, 1e-9)
                if stage in (WEIGHTS, NEW_WEIGHTS):
                    entry["bias"] = values(seed if stage == NEW_WEIGHTS else 3)
    result = compare(left, right, 1e-4)
    assert (result.first, result.cause) == (None, None) and result.least is not None
    assert result.largest < 1e-6 and max(result.sizes) == 0.0


def test_what_is_wrong_on_both_sides_is_a_note() -> None:
    left, right = record(), record()
    for made in (left, right):
        put(made, 2, LOSS, math.nan)
        put(made, -1, WEIGHTS, W9, 1)
    result = compare(left, right, 1e-4)
    assert result.least is None
    assert result.notes == [
        "On both sides, losses or gradients are infinite or NaN (first in step 2).",
        "On both sides, the ranks begin with different weights (first in step 0).",
    ]


def resumed(step: int) -> Record:
    """Return the record of a run that resumes before a step."""
    found = record()
    for rank in found["ranks"]:
        kept = [entry for entry in rank["values"] if entry[0] >= step]
        initial = [[-1, WEIGHTS, 0, {"w": values(2999 + step)}], [-1, BUFFERS, 0, {"norm.mean": values(3999 + step)}]]
        rank["values"] = [*initial, *([entry[0] - step, *entry[1:]] for entry in kept)]
    return found


@pytest.mark.parametrize("is_left", [False, True])
def test_a_resumed_run_is_compared_from_its_first_step_on(is_left: bool) -> None:
    other = resumed(2)
    pair = (other, record()) if is_left else (record(), other)
    result = compare(*pair, 0.0)
    assert (result.begin, result.first, result.least) == (2, None, None)
    assert result.losses == [[1206.5] * 2, [1306.5] * 2]
    drop(other, lambda entry: entry[:2] == [0, STATE])
    result = compare(*pair, 0.0)
    assert result.first is not None and (result.first.step, result.first.stage) == (2, STATE)
    assert result.cause is not None and result.cause.kind == "optimizer-state"
    other = resumed(2)
    for rank in range(2):
        put(other, 0, BATCH, values(1000 + rank), rank)
        put(other, 0, SAMPLES, [f"{rank}a", f"{rank}b"], rank)
    cause = compare(*((other, record()) if is_left else (record(), other)), 0.0).cause
    assert cause is not None and cause.kind == "sampler-state"


def samples_of(other: Record, begin: int, sampled: Callable[[int, int, int], list[str]]) -> None:
    """Let a run that resumes before step `begin` read these samples: sampled(step, number, rank)."""
    every(SAMPLES, lambda step, number, rank: sampled(step + begin, number, rank))(other)
    every(BATCH, lambda *place: values(hash(place)))(other)


def test_a_resumed_run_has_read_what_was_read_before() -> None:
    def in_another_order(step: int, number: int, rank: int) -> list[str]:
        """Return half of the samples of each step of the epoch."""
        return [sampled(step, number, rank)[0], sampled(5 - step, number, rank)[1]]

    def again(step: int, number: int, rank: int) -> list[str]:
        return sampled(step - 1, number, rank)

    for begin, read, kind in ((2, in_another_order, "data-order"), (1, again, "sampler-state")):
        other = resumed(begin)
        samples_of(other, begin, read)
        result = compare(record(), other, 0.0)
        assert result.begin == begin and result.cause is not None and result.cause.kind == kind


def test_of_several_steps_with_the_same_weights_a_run_resumes_where_most_is_equal() -> None:
    """As after steps with a rate of 0."""
    whole = record()
    put(whole, 1, NEW_WEIGHTS, values(3002))
    result = compare(whole, resumed(3), 0.0)
    assert (result.begin, result.first) == (3, None)


def test_an_early_step_of_the_whole_run_is_not_one_of_the_resumed_run() -> None:
    whole, other = record(), resumed(2)
    adding(-1, EARLY, W9)(whole)
    put(other, 0, STATE, W9)
    cause = compare(whole, other, 0.0).cause
    assert cause is not None and cause.kind == "optimizer-state"


def test_a_layer_that_had_no_effect_before_hides_no_other_cause() -> None:
    other = record()
    for entry in (entry for rank in other["ranks"] for entry in rank["values"] if entry[1] == LAYERS):
        entry[3][""] = "float32 with scale frozen"
    put(other, 1, OUTPUT, W9, 0)
    put(other, 1, OPERATIONS, [["Div", {"other": 2.0}], ["", {}], ["Gelu", {}]])
    cause = compare(record(), other, 0.0).cause
    assert cause is not None and cause.kind == "operations"


def test_what_differs_besides_the_cause_is_a_note() -> None:
    other = record()
    all_of(layers(first="GELU()", norm="BatchNorm(momentum=0.1) in evaluation"), output(call(9, 8)))(other)
    next(e for e in other["ranks"][0]["values"] if e[:3] == [0, CALLS, 0])[3]["first"] = call(1000, 9)
    every(SETTINGS, lambda *_: 0.2, 1)(other)
    every(OPERATIONS, lambda *_: [["Div", {"other": 2.0}], ["", {}], ["Gelu", {}]])(other)
    result = compare(record(), other, 0.0)
    assert result.cause is not None and result.cause.text.startswith("The layer first is Linear() on the left")
    assert result.notes == [
        "These differ, too, as an effect of the cause or without an effect: "
        "lr of group 0 (step 1), layer norm, operations (Relu() / Gelu())."
    ]


def test_the_step_with_which_a_run_resumes_can_be_given() -> None:
    other = resumed(2)
    put(other, -1, WEIGHTS, W9)
    result = compare(record(), other, 0.0, 2)
    assert result.first is not None and (result.first.step, result.first.stage) == (1, WEIGHTS)
    assert result.losses == [[1206.5] * 2, [1306.5] * 2]


def test_other_collectives_are_a_note() -> None:
    left, right = record(), record()
    for made in (left, right):
        for rank in made["ranks"]:
            rank["values"] += [[step, COLLECTIVE, 0, {"": "allreduce(float32[3])"}] for step in range(STEPS)]
    assert compare(left, right, 0.0).notes == []
    put(right, 2, COLLECTIVE, "allgather(float32[3])", 1)
    right["ranks"][0]["values"].append([3, COLLECTIVE, 1, {"": "barrier()"}])
    result = compare(left, right, 0.0)
    assert result.first is None
    assert result.notes == [
        "The script's collectives differ first in step 2, rank 1, call 0: allreduce(float32[3]) on the left, "
        "allgather(float32[3]) on the right."
    ]


def test_other_numbers_of_processes_compare_what_stays_comparable() -> None:
    one = record(1)
    for step in range(STEPS):
        put(one, step, REDUCED, reduced(step))
        for number in range(PASSES):
            put(one, step, LOSS, 1001.5 + 100 * step + 10 * number, number=number)
            put(one, step, BATCH, values(9), number=number)
    assert compare(record(), one, 1e-4).first is None
    assert "2 and 1 processes" in compare(record(), one, 1e-4).notes[0]
    every(OPERATIONS, lambda *_: [["Nll", {"total_weight": 8.0}], ["", {}]])(one)  # of another batch of a rank
    put(one, 1, LOSS, 1101.5 * (1 + 1e-7))
    assert compare(record(), one, 1e-4).first is None
    put(one, 1, LOSS, 1.0)
    cause = compare(record(), one, 1e-4).cause
    assert cause is not None and cause.kind == "global-batch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64])
def test_the_difference_of_two_sketches_is_that_of_the_tensors(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(3000, generator=generator).to(dtype)
    other = tensor.clone()
    other[5] += 8
    real = ((tensor - other).abs().double().norm() / other.abs().double().norm()).item()
    assert difference(fingerprint(tensor), fingerprint(other)) == pytest.approx(real, rel=0.01)
    assert difference(fingerprint(tensor), fingerprint(tensor.clone())) == 0.0


def test_whole_numbers_are_equal_or_not() -> None:
    tokens = torch.arange(8192)
    other = tokens.clone()
    other[5] += 1
    assert difference(fingerprint(tokens), fingerprint(other)) == math.inf
    assert difference(fingerprint(tokens), fingerprint(tokens.clone())) == 0.0


def test_batches_that_only_one_side_has_are_a_difference() -> None:
    other = record()
    drop(other, lambda entry: entry[1] == BATCH)
    first = compare(record(), other, 1e-4).first
    assert first is not None and first.stage == BATCH


def test_a_forward_before_the_optimizer_exists_is_not_compared() -> None:
    other = record()
    adding(-1, BATCH, W9)(other)
    adding(-1, LOSS, 1.0)(other)
    assert compare(record(), other, 0.0).first is None


def test_a_fingerprint_sees_dtype_shape_and_what_is_not_finite() -> None:
    ones = torch.ones(4)
    assert difference(fingerprint(ones), fingerprint(ones.double())) > 0
    assert difference(fingerprint(ones), fingerprint(ones.reshape(2, 2))) > 0
    assert difference(fingerprint(ones), fingerprint(ones / 0)) == math.inf
    assert difference(fingerprint(ones / 0), fingerprint(ones / 0)) == 0.0
    assert fingerprint(torch.empty(0))[1] == 0.0
    assert fingerprint(torch.tensor(2.0).expand(1)) == fingerprint(torch.tensor([2.0]))
    assert fingerprint(torch.tensor([0.1]), True)[4] is None
    assert fingerprint(torch.tensor([0.5]), True)[4] == "bfloat16"


def test_a_layer_has_a_mode_where_its_code_reads_it_and_its_arguments_if_it_is_of_torch(tmp_path: Path) -> None:
    layer = Recorder(tmp_path, 1, 0, 1).layer
    attention = torch.nn.MultiheadAttention(4, 2, dropout=0.25)
    assert {"num_heads=2", "dropout=0.25", "in training"} <= {*re.split("(?<!in) ", layer(attention))}
    assert layer(torch.nn.Dropout(0.1).eval()) == "Dropout(p=0.1) in evaluation "
    assert "training" not in layer(torch.nn.Linear(2, 2)) + layer(torch.nn.Sequential(torch.nn.Dropout()))


def test_gradients_are_read_after_a_backward_in_the_step_that_applies_them(tmp_path: Path) -> None:
    class Reducing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    recorder, param = Recorder(tmp_path, 1, 0, 1), torch.nn.Parameter(torch.ones(1))
    torch.optim.SGD([param])  # torch prepares the `step` of each class in its first instance
    optimizer = Reducing([param])

    def stages_of_steps() -> list[str]:
        recorder.step_depth = 0
        for _ in ("Reducing.step", "SGD.step"):
            recorder.see_step(optimizer)
        return [stage for _, stage, _, _ in recorder.record["values"]]

    assert stages_of_steps() == []
    recorder.has_backward = True
    assert stages_of_steps().count("reduced gradient") == 1
    settings = next(made for _, stage, _, made in recorder.record["values"] if stage == SETTINGS)
    assert next(iter(settings)) == "class"  # of another optimizer, other rates are no cause


def test_operations_have_their_numbers_targets_and_branches() -> None:
    target = torch.zeros(2)
    output = torch.tensor([1.0, -2.0], requires_grad=True).relu()
    loss = torch.nn.functional.mse_loss(output / 4, target)
    operations, targets, branches = _operations(loss, [output.grad_fn], True)
    assert [name for name, _ in operations] == ["MseLoss", "Div", "", "Relu", "AccumulateGrad"]
    assert operations[1][1]["other"] == 4.0
    assert targets == {"MseLoss": fingerprint(target)}
    two = loss + torch.nn.functional.mse_loss(output, target + 1)
    assert fingerprint(target + 1) in _operations(two, [], True)[1].values() and len(_operations(two, [], True)[1]) == 2
    assert branches == {"3:Relu": fingerprint(torch.tensor([True, False]))}
    (gelu, *_), *_ = _operations(torch.nn.functional.gelu(output, approximate="tanh"), [], True)
    assert gelu == ["Gelu", {"approximate": "tanh"}]
    number = torch.tensor(1.0, requires_grad=True)
    operations, _, branches = _operations((number.relu() * 2j).abs(), [], True)
    assert [name for name, _ in operations[:3]] == ["Abs", "Mul", "Relu"] and json.dumps(operations)
    assert branches == {"2:Relu": fingerprint(torch.tensor(True))}
    assert _operations(loss, [], False)[1:] == ({}, {})  # as in a checkpoint, whose forward would run again


@pytest.mark.parametrize(
    ("size", "tolerance", "code", "words"),
    [
        (0.0, "0", 0, "4 steps are equal bit for bit"),
        (2e-7, "1e-4", 0, "equal: 4 steps differ by "),
        (2e-7, "1e-8", 3, "only rounding: 4 steps differ by "),
        (2e-7, "inf", 0, "equal: 4 steps differ by "),
        (1e-2, "inf", 1, "different: step 1, rank 0, own gradient of w"),
    ],
)
def test_the_exit_code_tells_rounding_from_a_difference(
    size: float,
    tolerance: str,
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other, file = record(), tmp_path / "record.json"
    put(other, 1, OWN, near(own(1, 0, 0), size), 0)
    file.write_text(json.dumps(record() | {"warnings": ["UserWarning: of the script"]}))
    monkeypatch.setattr("dualdist.parity.command.run_cell", lambda *_, **__: other)
    arguments = ["--against", str(file), "--right", "torch+gloo@run", "--tolerance", tolerance, __file__]
    assert main(["parity", *arguments]) == code
    shown = capsys.readouterr().out
    assert words in shown and "warning of the left: UserWarning: of the script" in shown


@pytest.mark.parametrize(
    ("text", "expected", "variables"),
    [
        ("torch+gloo@mpirun x3,A=b=c,B=", ("torch", "gloo", "mpirun", 3), {"A": "b=c", "B": ""}),
        ("horovod+mpi", ("horovod", "mpi", "horovodrun", 2), {}),
        ("torch+gloo, A=4", ("torch", "gloo", "torchrun", 2), {"A": "4"}),
        ("torch+gloo,DEVICES=0,1,A=", ("torch", "gloo", "torchrun", 2), {"DEVICES": "0,1", "A": ""}),
    ],
)
def test_a_cell_is_parsed(text: str, expected: tuple[str, str, str, int], variables: dict[str, str]) -> None:
    cell = parse_cell(text, 2)
    assert (cell.backend, cell.transport, cell.launcher, cell.size) == expected
    assert cell.variables == variables


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("torch", "BACKEND+TRANSPORT"),
        ("local+gloo", "'local'"),
        ("torch+gloo@nothing", "'nothing'"),
        ("torch+tin@run", "'tin'"),
        ("torch+gloo@run x0", "at least 1 process"),
        ("torch+gloo,FAULT", "NAME=VALUE"),
        ("torch+gloo,python=/nowhere/python", "/nowhere/python"),
    ],
)
def test_the_error_for_a_wrong_cell_names_the_problem(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words.replace("+", r"\+")):
        parse_cell(text, 2)


def test_a_record_of_fewer_steps_is_compared_as_far_as_it_goes() -> None:
    short, other = record(), record()
    short["steps"] = 2
    drop(short, lambda entry: entry[0] >= 2)
    put(other, 2, REDUCED, values(9))
    assert compare(short, other, 0.0).first is None
    assert len(compare(other, short, 0.0).losses) == 2


def test_records_are_not_changed() -> None:
    left, right = record(), record()
    put(right, 1, REDUCED, values(9))
    before = copy.deepcopy((left, right))
    compare(left, right, 1e-4)
    assert (left, right) == before
