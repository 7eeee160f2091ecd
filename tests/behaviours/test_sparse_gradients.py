"""Training with sparse gradients of embeddings."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import dualdist as hvd

from ..helpers.styles import sgd
from ..helpers.world import everywhere


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=["sum", "average"])
@pytest.mark.parametrize("sparse_as_dense", [False, True], ids=["sparse", "as-dense"])
@everywhere
def test_sparse_embeddings_sum_or_average_their_rows(sparse_as_dense: bool, op: int) -> None:
    rank, size = hvd.rank(), hvd.size()
    table, scale = nn.Embedding(5, 2, sparse=True), nn.Parameter(torch.zeros(1))
    nn.init.zeros_(table.weight)
    optimizer = sgd([table.weight, scale], sparse_as_dense=sparse_as_dense, op=op)
    divisor = size if op == hvd.Average else 1
    for number in (1, 2):
        optimizer.zero_grad()
        (table(torch.tensor([0, rank + 1, rank + 1])).sum() + scale.sum()).backward()
        assert table.weight.grad is not None and table.weight.grad.is_sparse
        optimizer.step()
        rows = [size] + [2.0] * size + [0.0] * (4 - size)
        expected = torch.tensor(rows).mul(-number / divisor).reshape(-1, 1).expand(5, 2)
        torch.testing.assert_close(table.weight.detach(), expected)
        assert scale.item() == pytest.approx(-number * size / divisor)


def dense_gradient(table: nn.Embedding) -> torch.Tensor:
    assert table.weight.grad is not None
    return table.weight.grad.to_dense()


@everywhere
def test_a_sparse_gradient_that_is_sent_as_a_dense_one_stays_until_it_is_combined() -> None:
    scale, table = nn.Parameter(torch.ones(1)), nn.Embedding(5, 2, sparse=True)
    optimizer = sgd([scale, table.weight], sparse_as_dense=True, groups=[[scale], [table.weight]])
    found = []
    scale.register_post_accumulate_grad_hook(lambda _: found.append(dense_gradient(table)))
    for _ in range(4):
        optimizer.zero_grad()
        last = scale.exp()  # its backward runs after that of the embedding, whose gradient is sent meanwhile
        (table(torch.tensor([hvd.rank()])).sum() * (hvd.rank() + 1) + last).backward()
    own = torch.zeros(5, 2)
    own[hvd.rank()] = hvd.rank() + 1.0
    torch.testing.assert_close(found, [own] * 4)
    expected = torch.zeros(5, 2)
    expected[: hvd.size()] = torch.arange(1.0, hvd.size() + 1).reshape(-1, 1) / hvd.size()
    torch.testing.assert_close(dense_gradient(table), expected)


@everywhere
def test_sparse_gradients_with_a_sparse_optimizer() -> None:
    table, reference = nn.Embedding(6, 3, sparse=True), nn.Embedding(6, 3, sparse=True)
    nn.init.ones_(table.weight)
    nn.init.ones_(reference.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(table.parameters(), lr=0.1))
    alone = torch.optim.SparseAdam(reference.parameters(), lr=0.1)
    for step in range(3):
        rows = [[step, rank] for rank in range(hvd.size())]
        optimizer.zero_grad()
        table(torch.tensor(rows[hvd.rank()])).square().sum().backward()
        optimizer.step()
        alone.zero_grad()
        (reference(torch.tensor(rows)).square().sum() / hvd.size()).backward()
        alone.step()
    torch.testing.assert_close(table.weight, reference.weight)


@pytest.mark.parametrize("length", [1, 1 << 18], ids=["small", "1MiB"])
@everywhere
def test_an_embedding_with_a_dense_gradient_after_a_step_in_which_it_was_unused(length: int) -> None:
    table, others, size = nn.Embedding(5, 2, sparse=True), [torch.zeros(length) for _ in range(3)], hvd.size()
    nn.init.zeros_(table.weight)
    first, *last = [nn.Parameter(other) for other in others]
    params = [first, table.weight, *last]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), op=hvd.Sum)
    for is_used, set_to_none in ((True, True), (False, True), (True, False), (True, False)):
        optimizer.zero_grad(set_to_none)
        loss = torch.stack([param.sum() for param in (first, *last)]).sum()
        (loss + table(torch.tensor([1])).sum() if is_used else loss).backward()
        optimizer.step()
    expected = torch.zeros(5, 2)
    expected[1] = -3.0 * size
    torch.testing.assert_close(table.weight.detach(), expected)
    assert all(bool((param == -4.0 * size).all()) for param in (first, *last))


@pytest.mark.parametrize("form", ["rows", "elements", "float16"])
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=["sum", "average"])
@everywhere
def test_a_gradient_that_is_sparse_on_one_rank_and_dense_on_the_others(op: int, form: str) -> None:
    dtype = torch.float16 if form == "float16" else torch.float32
    weight = nn.Parameter(torch.zeros(5, 2, dtype=dtype))
    other, size = nn.Parameter(torch.zeros(1, dtype=dtype)), hvd.size()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, other], lr=1.0), op=op)
    # The ranks take turns, also in the first step in which they find that the gradient is sparse somewhere.
    for step in range(3):
        optimizer.zero_grad()
        if hvd.rank() == step % size and form == "elements":  # it has two sparse dimensions
            weight.gather(0, torch.tensor([[1, 1]]), sparse_grad=True).sum().backward()
        elif hvd.rank() == step % size:
            functional.embedding(torch.tensor([1]), weight, sparse=True).sum().backward()
        else:
            (weight.sum() + other.sum()).backward()
        assert weight.grad is not None and weight.grad.is_sparse
        optimizer.step()
    expected = torch.full((5, 2), -3.0 * (size - 1), dtype=dtype)
    expected[1] = -3.0 * size
    divisor = size if op == hvd.Average else 1
    torch.testing.assert_close(weight.detach(), expected / divisor)
    torch.testing.assert_close(other.detach(), torch.full_like(other, -3.0 * (size - 1) / divisor))
