"""reducescatter, grouped_reducescatter and reduce."""

from __future__ import annotations

import pytest
import torch

import dualdist as hvd

from ..helpers.world import everywhere


def own(total: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of `total`. If they do not divide, each of the first ranks gets one more row."""
    rank, size = hvd.rank(), hvd.size()
    counts = [len(total) // size + (place < len(total) % size) for place in range(size)]
    return total[sum(counts[:rank]) : sum(counts[: rank + 1])]


def factor() -> int:
    return sum(range(1, hvd.size() + 1))


@pytest.mark.parametrize("rows", [0, 1, 6, 7, 5000])
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=["sum", "average"])
@everywhere
def test_each_rank_gets_its_rows_of_the_total(op: int, rows: int) -> None:
    whole = torch.arange(2.0 * rows).reshape(rows, 2)
    held = whole * (hvd.rank() + 1)
    result = hvd.reducescatter(held, op=op)
    expected = own(whole * factor() / (hvd.size() if op == hvd.Average else 1))
    torch.testing.assert_close(result, expected)
    assert torch.equal(held, whole * (hvd.rank() + 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint8, torch.int32, torch.int64], ids=str)
@everywhere
def test_every_dtype_is_summed(dtype: torch.dtype) -> None:
    whole = torch.arange(7)
    result = hvd.reducescatter((whole * (hvd.rank() + 1)).to(dtype), op=hvd.Sum)
    assert result.dtype == dtype and torch.equal(result, own(whole * factor()).to(dtype))


@everywhere
def test_factors_scale_before_and_after() -> None:
    whole = torch.arange(6.0)
    result = hvd.reducescatter(whole * (hvd.rank() + 1), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert torch.equal(result, own(whole * factor() * 2))


@everywhere
def test_reducescatter_takes_any_memory_layout() -> None:
    whole = torch.arange(12.0).reshape(2, 6)
    assert torch.equal(hvd.reducescatter(whole.t(), op=hvd.Sum), own(whole.t() * hvd.size()))


@everywhere
def test_a_handle_and_a_compressed_call_give_the_rows_of_the_rank() -> None:
    whole = torch.arange(6.0)
    assert torch.equal(hvd.synchronize(hvd.reducescatter_async(whole, op=hvd.Sum)), own(whole * hvd.size()))
    result = hvd.reducescatter(whole, compression=hvd.Compression.fp16)
    assert result.dtype == torch.float32 and torch.equal(result, own(whole))


@everywhere
def test_a_group_is_a_list_of_each() -> None:
    tensors = [torch.arange(7.0), torch.arange(4).reshape(2, 2)]
    now = hvd.grouped_reducescatter(tensors, op=hvd.Sum)
    later = hvd.synchronize(hvd.grouped_reducescatter_async(tensors, op=hvd.Sum))
    assert type(now) is list and type(later) is tuple  # as in Horovod
    for result in (now, later):
        for out, tensor in zip(result, tensors, strict=True):
            assert torch.equal(out, own(tensor * hvd.size()))


@everywhere
def test_other_ops_are_refused_as_horovod_refuses_them() -> None:
    with pytest.raises(hvd.HorovodInternalError, match="Sum or Average"):
        hvd.reducescatter(torch.ones(4), op=hvd.Max)
    with pytest.raises(ValueError, match="dimension"):
        hvd.reducescatter(torch.tensor(1.0))
    assert torch.equal(hvd.reducescatter(torch.ones(6)), own(torch.ones(6)))


@pytest.mark.parametrize("numel", [3, 5000])
@everywhere
def test_reduce_gives_the_root_the_total_and_the_others_zeros(numel: int) -> None:
    whole = torch.arange(float(numel))
    for root in range(hvd.size()):
        result = hvd.reduce(whole * (hvd.rank() + 1), root, op=hvd.Sum)
        assert torch.equal(result, whole * factor() if hvd.rank() == root else torch.zeros(numel))


@everywhere
def test_reduce_averages_by_default() -> None:
    result = hvd.reduce(torch.tensor(hvd.rank() + 1.0), 0)
    torch.testing.assert_close(result, torch.tensor(factor() / hvd.size() if hvd.rank() == 0 else 0.0))
