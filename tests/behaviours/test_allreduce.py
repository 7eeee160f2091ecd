"""allreduce and grouped_allreduce: values, dtypes, layouts, handles and names."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

import pytest
import torch

import dualdist as hvd
from dualdist.core.agreement import connections
from dualdist.core.meeting import links

from ..helpers.files import wait_for
from ..helpers.world import everywhere

VALUES = ([3, 1, 2], [1, 2, 2], [2, 3, 5])
"""The tensor of each rank."""
COMBINE: dict[int, Callable[[Iterable[float]], float]] = {
    hvd.Sum: sum,
    hvd.Min: min,
    hvd.Max: max,
    hvd.Product: math.prod,
}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SMALL, LARGE = 1, 4000
"""Repetitions of the values: the data fits into the message of the agreement, and does not fit."""


def mine(dtype: torch.dtype = torch.float32, repeat: int = SMALL) -> torch.Tensor:
    return torch.tensor(VALUES[hvd.rank()], dtype=dtype).repeat(repeat)


def combined(op: int) -> list[float]:
    return [COMBINE[op](column) for column in zip(*VALUES[: hvd.size()], strict=True)]


def mean() -> list[float]:
    return [total / hvd.size() for total in combined(hvd.Sum)]


@pytest.mark.parametrize("repeat", [SMALL, LARGE])
@everywhere
def test_average_divides_the_sum_by_the_number_of_ranks(repeat: int) -> None:
    torch.testing.assert_close(hvd.allreduce(mine(repeat=repeat)), torch.tensor(mean()).repeat(repeat))


@pytest.mark.parametrize("repeat", [SMALL, LARGE])
@pytest.mark.parametrize("op", COMBINE, ids=lambda op: {1: "sum", 3: "min", 4: "max", 5: "product"}[op])
@everywhere
def test_values_of_every_dtype_are_combined(op: int, repeat: int) -> None:
    for dtype in DTYPES:
        tensor = mine(dtype, repeat)
        result = hvd.allreduce(tensor, op=op)
        assert result.dtype == dtype
        assert result.tolist() == combined(op) * repeat
        assert tensor.tolist() == VALUES[hvd.rank()] * repeat


@pytest.mark.parametrize("repeat", [SMALL, LARGE])
@everywhere
def test_bool_combines_as_any_and_all(repeat: int) -> None:
    rank, size = hvd.rank(), hvd.size()
    tensor = torch.tensor([True, rank == 0, rank != 0, False]).repeat(repeat)
    alone = size == 1
    some, every = [True, True, not alone, False] * repeat, [True, alone, False, False] * repeat
    assert hvd.allreduce(tensor, op=hvd.Sum).tolist() == some
    assert hvd.allreduce(tensor, op=hvd.Max).tolist() == some
    assert hvd.allreduce(tensor, op=hvd.Min).tolist() == every
    assert hvd.allreduce(tensor, op=hvd.Product).tolist() == every


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@everywhere
def test_complex_numbers_add_and_average(dtype: torch.dtype) -> None:
    size = hvd.size()
    for repeat in (SMALL, LARGE):
        tensor = torch.tensor([complex(hvd.rank(), 1), complex(2, -hvd.rank())], dtype=dtype).repeat(repeat)
        total = torch.tensor(
            [complex(sum(range(size)), size), complex(2 * size, -sum(range(size)))], dtype=dtype
        ).repeat(repeat)
        torch.testing.assert_close(hvd.allreduce(tensor, op=hvd.Sum), total)
        torch.testing.assert_close(hvd.allreduce(tensor), total / size)
        torch.testing.assert_close(hvd.allreduce(tensor.conj(), op=hvd.Sum), total.conj().resolve_conj())
        conjugate = tensor.conj()
        hvd.allreduce_(conjugate, op=hvd.Sum)
        torch.testing.assert_close(conjugate.resolve_conj(), total.conj().resolve_conj())
        torch.testing.assert_close(tensor, total)


@pytest.mark.parametrize("repeat", [SMALL, LARGE])
@pytest.mark.parametrize("op", COMBINE, ids=lambda op: {1: "sum", 3: "min", 4: "max", 5: "product"}[op])
@everywhere
def test_factors_scale_before_and_after(op: int, repeat: int) -> None:
    result = hvd.allreduce(mine(repeat=repeat), op=op, prescale_factor=0.5, postscale_factor=4.0)
    halves = [[value / 2 for value in row] for row in VALUES[: hvd.size()]]
    assert result.tolist() == [4 * COMBINE[op](column) for column in zip(*halves, strict=True)] * repeat


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int8], ids=str)
@everywhere
def test_integers_scale_and_average_toward_zero(dtype: torch.dtype) -> None:
    size = hvd.size()
    for repeat in (SMALL, LARGE):
        values = [hvd.rank() + 1, -hvd.rank() - 1, 3, -3]
        tensor = torch.tensor(values, dtype=dtype).repeat(repeat)
        total = size * (size + 1) // 2
        assert hvd.allreduce(tensor).tolist() == [int(total / size), int(-total / size), 3, -3] * repeat
        halved = hvd.allreduce(tensor[2:4], op=hvd.Sum, prescale_factor=0.5)
        assert halved.tolist() == [size, -size]
        assert hvd.allreduce(tensor[2:4], postscale_factor=0.5).tolist() == [1, -1]


@everywhere
def test_large_integers_are_exact() -> None:
    big = 2**59
    tensor = torch.tensor([big + hvd.rank()])
    total = sum(big + rank for rank in range(hvd.size()))
    assert hvd.allreduce(tensor, op=hvd.Sum).tolist() == [total]
    assert hvd.allreduce(tensor).tolist() == [total // hvd.size()]


@everywhere
def test_small_integers_wrap_around() -> None:
    assert hvd.allreduce(torch.tensor([200], dtype=torch.uint8), op=hvd.Sum).tolist() == [200 * hvd.size() % 256]


@everywhere
def test_infinities_and_nan_survive() -> None:
    tensor = torch.tensor([math.inf, -math.inf, math.nan if hvd.rank() == 0 else 0.0, 1.0])
    result = hvd.allreduce(tensor).tolist()
    assert result[:2] == [math.inf, -math.inf] and math.isnan(result[2]) and result[3] == 1.0


@pytest.mark.parametrize("compression", ["fp16", "bf16", "none"])
@everywhere
def test_compression_returns_the_dtype_it_was_given(compression: str) -> None:
    compressor = getattr(hvd.Compression, compression)
    result = hvd.allreduce(mine(), op=hvd.Sum, compression=compressor)
    assert result.dtype == torch.float32 and result.tolist() == combined(hvd.Sum)
    assert hvd.allreduce(mine(torch.int64), op=hvd.Sum, compression=compressor).tolist() == combined(hvd.Sum)
    if compression != "none":  # as from Horovod, whose compressors a script may call in its own
        contexts = [compressor.compress(mine(dtype))[1] for dtype in (torch.float16, torch.bfloat16, torch.int64)]
        assert contexts == [torch.float16, torch.bfloat16, torch.int64]


@everywhere
def test_a_number_stays_a_number() -> None:
    result = hvd.allreduce(torch.tensor(hvd.rank() + 1.0), op=hvd.Sum)
    assert result.shape == () and result.item() == sum(range(1, hvd.size() + 1))


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)], ids=str)
@everywhere
def test_empty_tensors_keep_their_shape(shape: tuple[int, ...]) -> None:
    assert hvd.allreduce(torch.empty(shape)).shape == shape


@pytest.mark.parametrize("repeat", [SMALL, LARGE])
@everywhere
def test_memory_layout_does_not_matter(repeat: int) -> None:
    size, factor = hvd.size(), sum(range(1, hvd.size() + 1))
    whole = torch.arange(4.0 * 6 * repeat).reshape(4, 6 * repeat)
    held = whole * (hvd.rank() + 1)
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[1:3, 1:],
        lambda t: t[:, :1].expand(4, 5),
        lambda t: t.reshape(2, 2, 2, -1).to(memory_format=torch.channels_last),
    ]
    for view in views:
        result = hvd.allreduce(view(held), op=hvd.Sum)
        assert torch.equal(result, view(whole) * factor)
    assert torch.equal(held, whole * (hvd.rank() + 1)), "the input has changed"
    assert torch.equal(hvd.allreduce(held.t()), whole.t() * (factor / size))


@pytest.mark.parametrize("repeat", [SMALL, LARGE])
@everywhere
def test_in_place_returns_the_same_tensor(repeat: int) -> None:
    tensor = mine(repeat=repeat)
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
    assert tensor.tolist() == combined(hvd.Sum) * repeat


@pytest.mark.parametrize("repeat", [SMALL, LARGE])
@everywhere
def test_in_place_changes_only_the_view_it_was_given(repeat: int) -> None:
    table = torch.stack([mine(repeat=repeat), mine(repeat=repeat)], dim=1)
    hvd.allreduce_(table[:, 1], op=hvd.Max)
    assert table[:, 0].tolist() == VALUES[hvd.rank()] * repeat
    assert table[:, 1].tolist() == combined(hvd.Max) * repeat


@everywhere
def test_in_place_keeps_channels_last() -> None:
    image = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last) * (hvd.rank() + 1)
    hvd.allreduce_(image, op=hvd.Sum)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(image, torch.full((2, 3, 4, 5), float(sum(range(1, hvd.size() + 1)))))


@everywhere
def test_in_place_and_async_forms_leave_autograd_out() -> None:
    leaf = torch.ones(3, requires_grad=True)
    assert hvd.allreduce_(leaf, op=hvd.Sum) is leaf
    assert leaf.tolist() == [hvd.size()] * 3 and leaf.grad_fn is None and leaf.requires_grad
    result = hvd.synchronize(hvd.allreduce_async(leaf))
    assert not result.requires_grad


@everywhere
def test_a_handle_is_an_int_that_gives_its_result_once() -> None:
    handle = hvd.allreduce_async(mine(), op=hvd.Sum)
    assert type(handle) is int
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).tolist() == combined(hvd.Sum)
    assert hvd.synchronize(handle) is None
    with pytest.raises(ValueError, match="handle"):
        hvd.poll(handle)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("repeat", [SMALL, LARGE])
@everywhere
def test_async_calls_return_before_the_other_ranks_come(tmp_path: Path, repeat: int) -> None:
    if hvd.rank() == 0:
        handles = [hvd.allreduce_async(mine(repeat=repeat), op=op) for op in COMBINE]
        assert not any(hvd.poll(handle) for handle in handles)
        (tmp_path / "rank 0 has called").touch()
    else:
        wait_for([tmp_path / "rank 0 has called"])
        handles = [hvd.allreduce_async(mine(repeat=repeat), op=op) for op in COMBINE]
    for op, handle in reversed(list(zip(COMBINE, handles, strict=True))):
        assert hvd.synchronize(handle).tolist() == combined(op) * repeat


@everywhere
def test_async_in_place_gives_the_same_tensor() -> None:
    tensor = mine()
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
    assert hvd.synchronize(handle) is tensor
    assert tensor.tolist() == combined(hvd.Sum)


@everywhere
def test_synchronous_calls_wait_their_turn_behind_asynchronous_ones() -> None:
    tensor = mine(repeat=LARGE)
    handles = [hvd.allreduce_async_(tensor, op=hvd.Sum) for _ in range(3)]
    assert hvd.allreduce(mine(), op=hvd.Max).tolist() == combined(hvd.Max)
    for handle in handles:
        hvd.synchronize(handle)
    assert tensor.tolist() == [total * hvd.size() ** 2 for total in combined(hvd.Sum)] * LARGE


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_name_in_use_is_a_value_error_and_the_first_call_stays_valid(tmp_path: Path) -> None:
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(mine(), name="gradient", op=hvd.Sum)
        with pytest.raises(ValueError, match="gradient"):
            hvd.allreduce_async(mine(), name="gradient", op=hvd.Sum)
        (tmp_path / "rank 0 has called").touch()
    else:
        wait_for([tmp_path / "rank 0 has called"])
        handle = hvd.allreduce_async(mine(), name="gradient", op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == combined(hvd.Sum)
    assert hvd.allreduce(mine(), name="gradient", op=hvd.Sum).tolist() == combined(hvd.Sum)


@everywhere
def test_what_cannot_be_reduced_is_a_value_error() -> None:
    refused: list[tuple[torch.Tensor, int]] = [
        (torch.tensor([True]), hvd.Average),
        (torch.ones(2, dtype=torch.complex64), hvd.Max),
        (torch.ones(2, dtype=torch.int32), hvd.Adasum),
    ]
    for tensor, op in refused:
        with pytest.raises(ValueError, match="must"):
            hvd.allreduce(tensor, op=op)
    assert hvd.allreduce(mine(), op=hvd.Sum).tolist() == combined(hvd.Sum)


@pytest.mark.parametrize("repeat", [SMALL, LARGE])
@everywhere
def test_a_group_may_mix_dtypes_shapes_and_layouts(repeat: int) -> None:
    factor = sum(range(1, hvd.size() + 1))
    whole = [
        torch.arange(6.0 * repeat).reshape(2, -1),
        torch.arange(4 * repeat),
        torch.tensor(1.5),
        torch.empty(0),
        torch.arange(8.0 * repeat, dtype=torch.float64).reshape(4, -1).t(),
        torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last),
    ]
    held = [tensor * (hvd.rank() + 1) for tensor in whole]
    result = hvd.grouped_allreduce(held, op=hvd.Sum)
    assert type(result) is list
    for out, tensor in zip(result, whole, strict=True):
        assert out.dtype == tensor.dtype and torch.equal(out, tensor * factor)
    in_place = hvd.grouped_allreduce_(held, op=hvd.Sum)
    assert type(in_place) is tuple
    for out, tensor, expected in zip(in_place, held, whole, strict=True):
        assert out is tensor and torch.equal(tensor, expected * factor)


@everywhere
def test_group_handles_give_a_tuple_as_horovods_do() -> None:
    tensors = [mine(), mine(torch.int64)]
    result = hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Max))
    assert type(result) is tuple
    assert [out.tolist() for out in result] == [combined(hvd.Max)] * 2
    in_place = hvd.synchronize(hvd.grouped_allreduce_async_(tensors, op=hvd.Max))
    assert type(in_place) is tuple
    assert all(out is tensor for out, tensor in zip(in_place, tensors, strict=True))
    assert tensors[0].tolist() == combined(hvd.Max)


@everywhere
def test_a_small_allreduce_and_a_barrier_make_few_calls_of_python() -> None:
    """They cost about as much as these calls: a small reduction is sent with the agreement."""
    tensor = torch.ones(256)
    assert fewest_calls(lambda: hvd.allreduce_(tensor, op=hvd.Sum)) <= 56
    assert fewest_calls(hvd.barrier) <= 36


def fewest_calls(function: Callable[[], object]) -> int:
    """Return how many functions of Python one call of `function` runs at least, of 20.

    Those of the agreement's connections are left out: their number depends on when the other members send.
    """
    counts = []
    for _ in range(20):
        events: list[str] = []

        def record(frame: FrameType, event: str, argument: object, seen: list[str] = events) -> None:
            if frame.f_code.co_filename not in (connections.__file__, links.__file__):
                seen.append(event)

        sys.setprofile(record)
        try:
            function()
        finally:
            sys.setprofile(None)
        counts.append(events.count("call"))
    return min(counts)
