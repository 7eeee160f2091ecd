"""allgather, grouped_allgather and gather."""

from __future__ import annotations

import pytest
import torch

import dualdist as hvd

from ..helpers.exchanges import exchanges
from ..helpers.world import everywhere

WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
DTYPES = (*WHOLE, *FLOATS)


def rows(rank: int, width: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the tensor of `rank`. It has `rank` rows, so rank 0 has none."""
    return (torch.arange(rank * width).reshape(rank, width) + 10 * rank).to(dtype)


def all_rows(width: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.cat([rows(rank, width, dtype) for rank in range(hvd.size())])


@pytest.mark.parametrize("width", [2, 5000])
@everywhere
def test_allgather_keeps_rank_order_when_lengths_differ(width: int) -> None:
    for dtype in DTYPES:
        result = hvd.allgather(rows(hvd.rank(), width, dtype))
        assert result.dtype == dtype
        assert torch.equal(result, all_rows(width, dtype))


@everywhere
def test_numbers_become_a_vector() -> None:
    number, expected = torch.tensor(hvd.rank() + 0.5), [rank + 0.5 for rank in range(hvd.size())]
    assert hvd.allgather(number).tolist() == expected
    assert hvd.gather(number, 0).tolist() == (expected if hvd.rank() == 0 else [])


@everywhere
def test_allgather_of_nothing_is_empty() -> None:
    assert hvd.allgather(torch.empty(0, 3)).shape == (0, 3)
    assert hvd.allgather(torch.empty(2, 0)).shape == (2 * hvd.size(), 0)


@everywhere
def test_allgather_takes_any_memory_layout() -> None:
    held = torch.arange(12.0).reshape(3, 4) + hvd.rank()
    expected = torch.cat([(torch.arange(12.0).reshape(3, 4) + rank).t()[::2] for rank in range(hvd.size())])
    assert torch.equal(hvd.allgather(held.t()[::2]), expected)


@everywhere
def test_allgather_handle_gives_the_rows() -> None:
    handle = hvd.allgather_async(rows(hvd.rank()), name="rows")
    assert torch.equal(hvd.synchronize(handle), all_rows())
    assert hvd.synchronize(handle) is None


@everywhere
def test_grouped_allgather_is_a_tuple_of_each() -> None:
    rank, size = hvd.rank(), hvd.size()
    tensors = [rows(rank), rows(size - rank, 1, torch.int16), torch.tensor(rank)]
    expected = [
        all_rows(),
        torch.cat([rows(size - other, 1, torch.int16) for other in range(size)]),
        torch.arange(size),
    ]
    now, later = hvd.grouped_allgather(tensors), hvd.synchronize(hvd.grouped_allgather_async(tensors))
    for result in (now, later):
        assert type(result) is tuple
        assert all(torch.equal(out, wanted) for out, wanted in zip(result, expected, strict=True))


@everywhere
def test_gather_gives_the_root_everything_and_the_others_nothing() -> None:
    for root in range(hvd.size()):
        result = hvd.gather(rows(hvd.rank()), root)
        assert torch.equal(result, all_rows() if hvd.rank() == root else torch.empty(0, 2))


@everywhere
def test_the_gradient_of_allgather_takes_one_agreement() -> None:
    """The forward has shown how many rows each rank has."""
    own = rows(hvd.rank() + 1).requires_grad_()
    total = hvd.allgather(own).sum()
    with exchanges() as messages:
        total.backward()
    assert len(messages) == 1
    assert own.grad is not None and own.grad.eq(1).all()
