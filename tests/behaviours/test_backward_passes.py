"""How many backwards make a step: accumulation, several losses, and gradients that are kept from the last step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.styles import distributed
from ..helpers.world import everywhere


@everywhere
def test_a_partial_window_is_combined_by_the_step() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), backward_passes_per_step=3)
    mine, mean = hvd.rank() + 1.0, (hvd.size() + 1) / 2
    for _ in range(2):
        weight.mul(mine).sum().backward()
    optimizer.step()
    assert weight.item() == -2 * mean
    optimizer.zero_grad()
    for _ in range(3):
        weight.mul(mine).sum().backward()
    assert weight.grad is not None and weight.grad.item() == 3 * mean
    optimizer.step()
    assert weight.item() == -5 * mean


@everywhere
def test_passes_per_step_can_change_while_gradients_are_kept() -> None:
    """Until the last pass, gradients are this rank's own."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    mine, mean = hvd.rank() + 1.0, (hvd.size() + 1) / 2

    def backward() -> float:
        weight.mul(mine).sum().backward()
        assert weight.grad is not None
        return weight.grad.item()

    assert backward() == pytest.approx(mean)
    assert backward() == pytest.approx(2 * mean)
    optimizer.set_backward_passes_per_step(2)
    assert backward() == pytest.approx(2 * mean + mine)
    assert backward() == pytest.approx(4 * mean)
    optimizer.set_backward_passes_per_step(1)
    assert backward() == pytest.approx(5 * mean)


@everywhere
def test_two_passes_are_combined_in_backward_when_gradients_are_zeroed_in_place() -> None:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), backward_passes_per_step=2)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        for _ in range(2):
            sum((hvd.rank() + 1.0) * weight.sum() for weight in weights).backward()  # type: ignore[union-attr]
        for weight in weights:
            assert float(weight.grad) == pytest.approx(hvd.size() + 1)  # type: ignore[arg-type]
        optimizer.step()


@everywhere
def test_gradients_kept_from_a_step_accumulate_without_synchronization() -> None:
    model = nn.Linear(1, 1, bias=False)
    wrapped = hvd.DistributedDataParallel(model)
    mine, mean = torch.tensor([[hvd.rank() + 1.0]]), (hvd.size() + 1) / 2
    for number in range(3):
        wrapped(mine).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.item() == pytest.approx((3 * number + 1) * mean)
        with wrapped.no_sync():
            for _ in range(2):
                wrapped(mine).sum().backward()
        assert model.weight.grad.item() == pytest.approx((3 * number + 1) * mean + 2 * mine.item())
        wrapped(mine).sum().backward()
        assert model.weight.grad.item() == pytest.approx((3 * number + 4) * mean)
        model.weight.grad = model.weight.grad - mean  # another tensor


@everywhere
def test_several_losses_in_one_step_average_each_once() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    mean = (hvd.size() + 1) / 2
    for factor in (1.0, 10.0, 100.0):
        weight.mul(factor * (hvd.rank() + 1)).sum().backward()
    assert weight.grad is not None and weight.grad.item() == pytest.approx(111 * mean)
    optimizer.step()
    assert weight.item() == pytest.approx(-111 * mean)


@everywhere
def test_a_pass_too_many_under_sum_is_an_error() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
    optimizer.zero_grad()
    weight.sum().backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        weight.sum().backward()


@everywhere
def test_a_gradient_that_was_set_by_hand_is_part_of_its_first_sum() -> None:
    weight, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, other], lr=1.0), op=hvd.Sum)
    weight.sum().backward()
    other.grad = torch.full([1], 10.0)
    other.sum().backward()
    assert other.grad.item() == 11 * hvd.size()
    optimizer.step()
    assert weight.item() == -hvd.size()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("style", ["optimizer", "module"])
@everywhere
def test_a_rank_that_has_removed_a_gradient_before_it_is_combined_counts_as_zero(style: str) -> None:
    model: Any = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
    wrapped, optimizer = distributed(style, model, torch.optim.SGD(model.parameters(), lr=0.0))
    wrapped = optimizer if style == "optimizer" else wrapped
    first, second = model.parameters()
    (first + second).sum().backward()
    with wrapped.no_sync():
        if hvd.rank() == 0:
            first.sum().backward()
            first.grad = None
    second.sum().backward()
    assert first.grad is not None
    assert first.grad.item() == pytest.approx((hvd.size() - 1) / hvd.size())


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_second_backward_that_only_rank_0_adds_to_is_averaged_once() -> None:
    weight, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, other], lr=1.0))
    optimizer.zero_grad()
    weight.sum().backward()
    (10 * weight if hvd.rank() == 0 else other).sum().backward()
    assert weight.grad is not None and other.grad is not None
    assert weight.grad.item() == pytest.approx(1 + 10 / hvd.size())
    assert other.grad.item() == pytest.approx((hvd.size() - 1) / hvd.size())


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=["sum", "average"])
@everywhere
def test_synchronize_and_skip_synchronize_never_reduce_twice(op: int) -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=op)
    total = sum(range(1, hvd.size() + 1)) / (hvd.size() if op == hvd.Average else 1)
    for number in range(1, 4):
        optimizer.zero_grad()
        weight.mul(hvd.rank() + 1.0).sum().backward()
        optimizer.synchronize()
        optimizer.synchronize()
        assert weight.grad is not None and weight.grad.item() == total
        if number == 2:
            optimizer.step()
        else:
            with optimizer.skip_synchronize():
                optimizer.step()
        assert weight.item() == pytest.approx(-number * total)
