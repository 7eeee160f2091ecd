"""Why two trainings differ: the comparison of `dualdist parity`, with records that are written by hand."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dualdist.errors import ConfigurationError
from dualdist.parity.command import parse_cell
from dualdist.parity.comparison import (
    _CAUSES,
    BATCH,
    BUFFERS,
    COLLECTIVE,
    LOSS,
    NEW_BUFFERS,
    NEW_WEIGHTS,
    OWN,
    RANDOM,
    REDUCED,
    SETTINGS,
    WEIGHTS,
    compare,
    difference,
)
from dualdist.parity.recorder import fingerprint

STEPS, PASSES = 4, 2
Record = dict[str, Any]
Fault = Callable[[Record], None]


@functools.cache
def values(seed: int, scale: float = 1.0) -> list[Any]:
    """Return the fingerprint of a tensor."""
    tensor = torch.randn(40, generator=torch.Generator().manual_seed(seed))
    return fingerprint(tensor * scale, True)


def record(size: int = 2) -> Record:
    """Return a record with one tensor of each kind."""
    ranks = []
    for rank in range(size):
        entries: list[Any] = [[-1, WEIGHTS, 0, {"w": values(1)}], [-1, BUFFERS, 0, {"b": values(2)}]]
        for step in range(STEPS):
            for number in range(PASSES):
                own = 1000 + 100 * step + 10 * number + rank
                entries += [
                    [step, BATCH, number, {"input.0": values(own)}],
                    [step, RANDOM, number, {"torch": f"{own}", "python": f"{own}"}],
                    [step, LOSS, number, {"": 1.0 + own}],
                    [step, OWN, number, {"w": values(own + 5)}],
                ]
            entries += [
                [step, REDUCED, 0, {"w": values(2000 + step)}],
                [step, SETTINGS, 0, {"lr of group 0": 0.1, "betas of group 0": "(0.9, 0.999)"}],
                [step, NEW_WEIGHTS, 0, {"w": values(3000 + step)}],
                [step, NEW_BUFFERS, 0, {"b": values(4000 + step)}],
            ]
        head = {
            "early_steps": 0,
            "early_changes": 0,
            "summing_error": 1e-7,
            "modules": {"Linear": 2, "BatchNorm1d": 1},
        }
        head |= {"threads": 1, "torch": "2.15", "python": "3.11", "device": "cpu", "rank": rank}
        ranks.append(head | {"values": entries, "steps": STEPS})
    return {"cell": "cell", "steps": 100, "seconds": 1.0, "ranks": ranks}


def put(changed: Record, step: int, stage: str, value: Any, rank: int | None = None, number: int = 0) -> None:
    """Replace the only value of an entry, on one rank or on all."""
    for made in changed["ranks"] if rank is None else changed["ranks"][rank : rank + 1]:
        entry = next(entry for entry in made["values"] if entry[:3] == [step, stage, number])
        entry[3] = {name: value for name in entry[3]}


def narrow(seed: int) -> list[Any]:
    tensor = torch.randn(40, generator=torch.Generator().manual_seed(seed))
    return fingerprint(tensor.half().float(), True)


def set_all(changed: Record, **values: Any) -> None:
    for rank in changed["ranks"]:
        rank.update(values)


def drop(changed: Record, is_gone: Callable[[list[Any]], bool]) -> None:
    for rank in changed["ranks"]:
        rank["values"] = [entry for entry in rank["values"] if not is_gone(entry)]


def putting(step: int, stage: str, value: Any, rank: int | None = None, **heads: Any) -> Fault:
    """Return what puts a value, and numbers of the whole record."""

    def plant(changed: Record) -> None:
        set_all(changed, **heads)
        put(changed, step, stage, value, rank)

    return plant


def fewer(step: int, first: int) -> Fault:
    """Return what drops the entries of a step from its pass `first` on."""
    return lambda made: drop(made, lambda entry: entry[0] == step and entry[2] >= first)


def half_accumulated(changed: Record) -> None:
    fewer(3, 1)(changed)
    put(changed, 3, REDUCED, values(2003, 0.5))


def betas(changed: Record) -> None:
    for rank in changed["ranks"]:
        for step, stage, _, settings in rank["values"]:
            if (step, stage) == (2, SETTINGS):
                settings["betas of group 0"] = "(0.9, 0.99)"


def dropout(changed: Record) -> None:
    for step, stage, _, states in changed["ranks"][1]["values"]:
        if stage == RANDOM:
            states["python"] = "not used, and different everywhere"
            states["torch"] = "different" if step >= 2 else states["torch"]
    put(changed, 2, LOSS, 7.0, 1)


def repeated_epoch(changed: Record) -> None:
    for rank in range(2):
        put(changed, 2, BATCH, values(1000 + rank), rank)


def overflow(changed: Record) -> None:
    put(changed, 2, OWN, values(5, math.inf), 1, number=1)
    put(changed, 2, REDUCED, values(5, math.inf))


W9, SYNC = values(9), {"Linear": 2, "SyncBatchNorm": 1}
FAULTS: dict[str, tuple[Fault, int, int, str, str]] = {
    "learning rate": (putting(0, SETTINGS, 0.2), 0, 0, SETTINGS, "learning-rate"),
    "betas": (betas, 2, 0, SETTINGS, "settings"),
    "early step": (putting(-1, WEIGHTS, W9, early_steps=1, early_changes=1), -1, 0, WEIGHTS, "early-step"),
    "early state": (putting(0, NEW_WEIGHTS, W9, early_steps=1), 0, 0, NEW_WEIGHTS, "early-step"),
    # Also of Adam, of which a step with gradients of zero changes the state alone.
    "seed of the model": (putting(-1, WEIGHTS, W9, early_steps=1), -1, 0, WEIGHTS, "initial-values"),
    "SyncBatchNorm": (putting(0, LOSS, 7.0, 0, modules=SYNC), 0, 0, LOSS, "sync-batch-norm"),
    "seed of the sampler": (putting(0, BATCH, W9, 1), 0, 1, BATCH, "data-order"),
    "set_epoch": (repeated_epoch, 2, 0, BATCH, "set-epoch"),
    "no sampler": (putting(0, BATCH, values(1000)), 0, 1, BATCH, "no-sampler"),
    "sum": (putting(1, REDUCED, values(2001, 2.0)), 1, 0, REDUCED, "average-or-sum"),
    "accumulation": (putting(0, LOSS, 2.0 * 1001, 0), 0, 0, LOSS, "accumulation"),
    "dropout": (dropout, 2, 1, LOSS, "random-numbers"),
    "parameters": (putting(-1, WEIGHTS, W9, 1), -1, 1, WEIGHTS, "no-broadcast"),
    "seed": (putting(-1, WEIGHTS, W9), -1, 0, WEIGHTS, "initial-values"),
    "buffers": (putting(3, NEW_BUFFERS, W9, 1), 3, 1, NEW_BUFFERS, "no-broadcast-of-buffers"),
    "overflow": (overflow, 2, 1, OWN, "overflow"),
    "wire": (putting(1, REDUCED, narrow(2001)), 1, 0, REDUCED, "wire-dtype"),
    "no reduction": (putting(1, REDUCED, W9, 1), 1, 1, REDUCED, "no-reduction"),
    "clipping": (putting(1, REDUCED, values(2001, 0.7)), 1, 0, REDUCED, "scale"),
    "fewer steps": (fewer(3, 0), 3, 0, BATCH, "number-of-steps"),
    "fewer passes": (fewer(3, 1), 3, 0, BATCH, "number-of-passes"),
    "fewer passes and half the gradient": (half_accumulated, 3, 0, BATCH, "number-of-passes"),
    "momentum": (putting(1, NEW_WEIGHTS, W9), 1, 0, NEW_WEIGHTS, "optimizer-state"),
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
    assert result.cause.kind == kind
    if "{side}" in _CAUSES.partition(f"\n{kind}: ")[2].partition("\n")[0]:
        assert ("left" if is_left else "right") in result.cause.text


def test_equal_records_are_equal() -> None:
    result = compare(record(), record(), 0.0)
    assert (result.first, result.cause, result.least, result.notes) == (None, None, None, [])
    assert result.losses == [[1006.5 + 100 * step] * 2 for step in range(STEPS)]


def test_a_difference_below_the_tolerance_is_not_one() -> None:
    other = record()
    put(other, 1, REDUCED, values(2001, 1 + 1e-6))
    set_all(other, threads=8)
    result = compare(record(), other, 1e-4)
    assert result.first is None and result.cause is None
    assert result.least is not None and (result.least.step, result.least.stage) == (1, REDUCED)
    assert 1e-7 < result.largest < 1e-5
    assert "threads 1 and right 8" in result.notes[0]


def test_rounding_that_grows_beyond_the_tolerance_is_called_rounding() -> None:
    other = record()
    for step, size in enumerate((1e-6, 1e-5, 5e-5, 3e-4)):
        put(other, step, NEW_WEIGHTS, values(3000 + step, 1 + size))
    result = compare(record(), other, 1e-4)
    assert result.first is not None and result.first.step == 3
    assert result.cause is not None and result.cause.kind == "rounding"


def noisy(seed: int, size: float) -> list[Any]:
    """Return the fingerprint of `values(seed)` with a part of another tensor, which is no multiple of it."""
    tensors = [torch.randn(40, generator=torch.Generator().manual_seed(each)) for each in (seed, 99)]
    return fingerprint(tensors[0] + size * tensors[1], True)


def test_a_gradient_that_jumps_while_the_loss_is_equal_is_called_rounding_only_after_rounding() -> None:
    """As where an activation changes its sign."""
    other = record()
    put(other, 2, OWN, noisy(1205, 1e-3), 0)
    result = compare(record(), other, 1e-4)
    assert result.cause is not None and result.cause.kind == "unknown"
    put(other, 0, NEW_WEIGHTS, noisy(3000, 1e-7))
    result = compare(record(), other, 1e-4)
    assert result.first is not None and (result.first.step, result.first.stage) == (2, OWN)
    assert result.cause is not None and result.cause.kind == "rounding-jump"


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


def test_a_jump_after_rounding_is_not_called_rounding() -> None:
    other = record()
    put(other, 0, NEW_WEIGHTS, values(3000, 1 + 1e-7))
    put(other, 1, REDUCED, values(2001, 2.0))
    result = compare(record(), other, 1e-4)
    assert result.cause is not None and result.cause.kind == "average-or-sum"


def test_other_numbers_of_processes_compare_what_stays_comparable() -> None:
    one = record(1)
    for step in range(STEPS):
        for number in range(PASSES):
            put(one, step, LOSS, 1001.5 + 100 * step + 10 * number, number=number)
            put(one, step, BATCH, values(9), number=number)
    assert compare(record(), one, 1e-4).first is None
    assert "2 and 1 processes" in compare(record(), one, 1e-4).notes[0]
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


def test_a_fingerprint_sees_dtype_shape_and_what_is_not_finite() -> None:
    ones = torch.ones(4)
    assert difference(fingerprint(ones), fingerprint(ones.double())) > 0
    assert difference(fingerprint(ones), fingerprint(ones.reshape(2, 2))) > 0
    assert difference(fingerprint(ones), fingerprint(ones / 0)) == math.inf
    assert difference(fingerprint(ones / 0), fingerprint(ones / 0)) == 0.0
    assert fingerprint(torch.empty(0))[1] == 0.0
    assert fingerprint(torch.tensor([0.1]), True)[4] is None
    assert fingerprint(torch.tensor([0.5]), True)[4] == "bfloat16"


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
