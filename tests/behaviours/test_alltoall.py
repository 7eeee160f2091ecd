"""alltoall and scatter."""

from __future__ import annotations

import pytest
import torch

import dualdist as hvd

from ..helpers.world import everywhere
from .test_allgather import DTYPES


def sent(rank: int, width: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the tensor of `rank`: j rows for each rank j, filled with the number 10 * rank + j."""
    lines = [10 * rank + other for other in range(hvd.size()) for _ in range(other)]
    return torch.tensor(lines).reshape(-1, 1).expand(-1, width).to(dtype)


@everywhere
def test_equal_shares_without_splits() -> None:
    rank, size = hvd.rank(), hvd.size()
    result = hvd.alltoall(torch.arange(2 * size) + 100 * rank)
    assert isinstance(result, torch.Tensor)
    assert result.tolist() == [100 * other + 2 * rank + row for other in range(size) for row in range(2)]


@pytest.mark.parametrize("width", [2, 5000])
@everywhere
def test_splits_send_as_many_rows_to_each_rank(width: int) -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in DTYPES:
        result, received = hvd.alltoall(sent(rank, width, dtype), splits=list(range(size)))
        expected = [10 * other + rank for other in range(size) for _ in range(rank)]
        assert torch.equal(result, torch.tensor(expected).reshape(-1, 1).expand(-1, width).to(dtype))
        assert received.dtype == torch.int32 and received.tolist() == [rank] * size


@everywhere
def test_splits_may_be_an_int32_tensor_and_leave_rows_over() -> None:
    rank, size = hvd.rank(), hvd.size()
    tensor = torch.arange(3.0 * size) + 100 * rank
    result, received = hvd.alltoall(tensor, torch.ones(size, dtype=torch.int32))
    assert result.tolist() == [100 * other + rank for other in range(size)]
    assert received.tolist() == [1] * size


@everywhere
def test_nothing_at_all_can_be_sent() -> None:
    result, received = hvd.alltoall(torch.empty(0, 3), splits=[0] * hvd.size())
    assert result.shape == (0, 3) and received.tolist() == [0] * hvd.size()
    assert hvd.alltoall(torch.empty(hvd.size(), 0)).shape == (hvd.size(), 0)  # type: ignore[union-attr]


@everywhere
def test_handle_always_gives_the_received_splits_too() -> None:
    rank, size = hvd.rank(), hvd.size()
    result, received = hvd.synchronize(hvd.alltoall_async(torch.arange(size) + 10 * rank))
    assert result.tolist() == [10 * other + rank for other in range(size)]
    assert received.dtype == torch.int32 and received.tolist() == [1] * size


@pytest.mark.ranks(2, 3)
@everywhere
def test_rows_that_do_not_divide_are_a_value_error() -> None:
    with pytest.raises(ValueError, match="rows"):
        hvd.alltoall(torch.ones(hvd.size() + 1))


@everywhere
def test_scatter_gives_each_rank_its_share_of_the_root() -> None:
    rank, size = hvd.rank(), hvd.size()
    for root in range(size):
        held = torch.arange(2 * size) + 100 * rank if rank == root else torch.empty(0, dtype=torch.int64)
        assert hvd.scatter(held, root).tolist() == [100 * root + 2 * rank, 100 * root + 2 * rank + 1]


@everywhere
def test_scatter_with_splits_on_the_root() -> None:
    rank, size = hvd.rank(), hvd.size()
    root = size - 1
    splits = list(range(size)) if rank == root else None
    assert torch.equal(
        hvd.scatter(sent(rank) if rank == root else torch.empty(0, 2), root, splits),
        torch.full((rank, 2), 10.0 * root + rank),
    )
