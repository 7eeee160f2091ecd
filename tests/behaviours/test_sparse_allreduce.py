"""sparse_allreduce_async: the sum or average of sparse COO tensors."""

from __future__ import annotations

import pytest
import torch

import dualdist as hvd

from ..helpers.world import everywhere


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=["sum", "average"])
@everywhere
def test_sparse_tensors_add_up_by_index(op: int) -> None:
    rank, size = hvd.rank(), hvd.size()
    tensor = torch.sparse_coo_tensor(
        torch.tensor([[0, rank + 1]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (5, 2), check_invariants=True
    )
    result = hvd.sparse_allreduce_async(tensor, name="rows", op=op)()
    assert result.is_sparse
    expected = torch.zeros(5, 2)
    expected[0] = torch.tensor([1.0, 2.0]) * size
    expected[1 : size + 1] = torch.tensor([3.0, 4.0])
    torch.testing.assert_close(result.to_dense(), expected / (size if op == hvd.Average else 1))
