"""DistributedDataParallel.join: ranks with different numbers of batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.world import everywhere


def zero_weight() -> Any:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def train(wrapped: nn.Module, batches: int) -> None:
    """Take a step of size 1 for each batch; the gradient of each rank is 1."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    for _ in range(batches):
        optimizer.zero_grad()
        wrapped(torch.ones(1, 1)).sum().backward()
        optimizer.step()


@pytest.mark.ranks(2, 3)
@everywhere
def test_uneven_numbers_of_batches_train_to_the_end() -> None:
    weight = zero_weight()
    wrapped: Any = hvd.DistributedDataParallel(weight)
    with wrapped.join():
        train(wrapped, 1 + hvd.rank())
    # In step k (from 0) the ranks from k on take part, and the average is over all.
    expected = -sum(hvd.size() - step for step in range(hvd.size())) / hvd.size()
    assert weight.weight.item() == pytest.approx(expected)


@everywhere
def test_averages_can_be_over_the_ranks_that_have_batches() -> None:
    weight = zero_weight()
    wrapped: Any = hvd.DistributedDataParallel(weight)
    with wrapped.join(divide_by_initial_world_size=False):
        train(wrapped, 1 + hvd.rank())
    assert weight.weight.item() == pytest.approx(-hvd.size())
    wrapped.zero_grad()
    wrapped(torch.full((1, 1), hvd.rank() + 1.0)).sum().backward()
    assert weight.weight.grad.item() == (hvd.size() + 1) / 2


@pytest.mark.ranks(2, 3)
@everywhere
def test_every_rank_raises_when_one_runs_out_of_batches() -> None:
    weight = zero_weight()
    wrapped: Any = hvd.DistributedDataParallel(weight)
    with pytest.raises(RuntimeError, match="at least one rank that exhausted inputs"):
        with wrapped.join(throw_on_early_termination=True):
            train(wrapped, 1 + hvd.rank())
    assert weight.weight.item() == -1.0
    with wrapped.join(throw_on_early_termination=True):
        train(wrapped, 2)  # the same number everywhere
    assert weight.weight.item() == -3.0


@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.world_kinds("torch-gloo", "torch-mpi")
@everywhere
def test_the_join_context_of_torch_takes_a_wrapper_and_an_optimizer_with_shared_state(by_all: bool) -> None:
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    weight = zero_weight()
    wrapped: Any = hvd.DistributedDataParallel(weight)
    optimizer: Any = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=1.0)
    with Join([wrapped, optimizer], divide_by_initial_world_size=by_all):
        for _ in range(1 + hvd.rank()):
            optimizer.zero_grad()
            wrapped(torch.ones(1, 1)).sum().backward()
            optimizer.step()
    average_over_all = -sum(hvd.size() - step for step in range(hvd.size())) / hvd.size()
    assert weight.weight.item() == pytest.approx(average_over_all if by_all else -hvd.size())
    wrapped.zero_grad()
    wrapped(torch.full((1, 1), hvd.rank() + 1.0)).sum().backward()
    assert weight.weight.grad.item() == (hvd.size() + 1) / 2
