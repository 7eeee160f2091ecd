"""Parameters that some ranks, or all, do not use in a step; shared and frozen ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.world import everywhere


@everywhere
def test_ranks_may_use_different_parts_of_the_model() -> None:
    rank, size = hvd.rank(), hvd.size()
    trunk = nn.Parameter(torch.zeros(1))
    heads = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(size)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*heads, trunk], lr=1.0))
    for number in (1, 2, 3):
        optimizer.zero_grad()
        ((heads[rank].sum() + trunk.sum()) * (rank + 1)).backward()
        optimizer.step()
        for place, head in enumerate(heads):
            assert head.tolist() == pytest.approx([-number * (place + 1) / size] * 2)
        assert trunk.item() == pytest.approx(-number * (size + 1) / 2)


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_rank_may_have_nothing_to_do_in_backward() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    for number in (1, 2):
        optimizer.zero_grad()
        if hvd.rank() > 0:
            weight.sum().backward()
        optimizer.step()
        assert weight.item() == pytest.approx(-number * (hvd.size() - 1) / hvd.size())


@everywhere
def test_tied_weights_are_reduced_once() -> None:
    weight = nn.Parameter(torch.zeros(1))
    first, second = nn.Module(), nn.Module()
    first.weight = second.weight = weight
    model = nn.ModuleList([first, second])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )
    ((first.weight + 2 * second.weight) * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    assert weight.item() == pytest.approx(-3 * (hvd.size() + 1) / 2)


@everywhere
def test_parameters_may_be_frozen_and_thawed_between_steps() -> None:
    body, head = nn.Parameter(torch.zeros(1), requires_grad=False), nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([body, head], lr=1.0))
    mine, mean = hvd.rank() + 1.0, (hvd.size() + 1) / 2
    ((body + head) * mine).sum().backward()
    optimizer.step()
    assert (body.item(), head.item()) == pytest.approx((0, -mean))
    body.requires_grad_(True)
    head.requires_grad_(False)
    for number in (1, 2):
        optimizer.zero_grad()
        ((body + head) * mine).sum().backward()
        optimizer.step()
        assert (body.item(), head.item()) == pytest.approx((-number * mean, -mean))


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_parameter_may_be_frozen_on_one_rank_only() -> None:
    rank, size = hvd.rank(), hvd.size()
    body, head = nn.Parameter(torch.zeros(1), requires_grad=rank > 0), nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([body, head], lr=1.0))
    for number in (1, 2, 3):
        optimizer.zero_grad()
        ((body + head) * number).sum().backward()
        optimizer.step()
        assert head.grad is not None and head.grad.item() == number
    assert (body.item(), head.item()) == pytest.approx((-6 * (size - 1) / size, -6))
