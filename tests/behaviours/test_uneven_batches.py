"""DistributedDataParallel.join: ranks with different numbers of batches."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.styles import distributed
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
    with wrapped.join(enable=False):
        assert not wrapped._is_joining


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


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.ranks(2, 3)
@everywhere
def test_only_what_is_in_a_join_block_of_torch_follows_it(fails: bool) -> None:
    from torch import distributed as dist
    from torch.distributed.algorithms.join import Join

    model: Any = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    wrapped: Any = hvd.DistributedDataParallel(model)

    def step() -> None:
        wrapped(torch.tensor([[1.0], [2.0]]) * (hvd.rank() + 1)).sum().backward()

    with contextlib.suppress(ArithmeticError), Join([wrapped]):
        for _ in range(2 if fails else 1 + hvd.rank()):
            step()
        if fails:
            raise ArithmeticError
    step()  # copies the buffers of rank 0 first
    for _ in range(2):
        step()
        total = torch.tensor([hvd.rank() + 10])
        dist.all_reduce(total)  # not taken for a message of Join
        assert total.item() == sum(range(10, 10 + hvd.size()))
    model.eval()
    with wrapped.join():
        for _ in range(1 + hvd.rank()):
            step()
    total = torch.tensor([hvd.rank() + 10])
    dist.all_reduce(total)
    assert total.item() == sum(range(10, 10 + hvd.size()))


@pytest.mark.parametrize("style", ["optimizer", "module", "Join of torch"])
@pytest.mark.ranks(2, 3)
@everywhere
def test_loss_scales_are_equal_after_uneven_batches(style: str) -> None:
    from torch.distributed.algorithms.join import Join

    layer = zero_weight()
    wrapped, optimizer = distributed(
        "optimizer" if style == "optimizer" else "module", layer, torch.optim.SGD(layer.parameters(), lr=0.0)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)

    def step() -> float:
        optimizer.zero_grad()
        scaler.scale(wrapped(torch.ones(1, 1)).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert layer.weight.grad is not None
        return float(layer.weight.grad.item())

    blocks: Any = {"module": lambda: wrapped.join(), "Join of torch": lambda: Join([wrapped])}
    with blocks.get(style, contextlib.nullcontext)():
        for _ in range(1 + 2 * hvd.rank()):
            step()
    last = hvd.join() if style == "optimizer" else hvd.size() - 1
    scaler.load_state_dict(hvd.broadcast_object(scaler.state_dict(), last))
    # One step more than a multiple of the interval.
    assert scaler.state_dict()["scale"] == 2.0 ** (hvd.size())
    assert scaler.state_dict()["_growth_tracker"] == 1
    assert [step() for _ in range(3)] == [1.0] * 3
