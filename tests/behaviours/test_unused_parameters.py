"""Parameters that some ranks, or all, do not use in a step; shared and frozen ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.styles import sgd
from ..helpers.world import everywhere


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
    optimizer = sgd(model.parameters(), named_parameters=model.named_parameters())
    ((first.weight + 2 * second.weight) * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    assert weight.item() == pytest.approx(-3 * (hvd.size() + 1) / 2)


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
