"""A warning by name when ranks start from different parameters or options."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.world import everywhere


def warned(train: Callable[[], object]) -> list[str]:
    """Run `train` in a world that compares the start; return this rank's warnings."""
    hvd.shutdown()
    with mock.patch.dict(os.environ, DUALDIST_COMPARE_START="1"):
        hvd.init()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train()
    hvd.shutdown()
    hvd.init()
    return [text for one in found if "The ranks start" in (text := str(one.message))]


def train(style: str, start: float, rate: float = 0.1) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64).to(torch.bfloat16))
    for param in model.parameters():
        nn.init.constant_(param, 0.5)
    nn.init.constant_(model[1].weight, start)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=rate)
    if style == "optimizer":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    else:
        model = hvd.DistributedDataParallel(model, init_sync=False)
    for _ in range(3):
        optimizer.zero_grad()
        sum(param.float().sum() for param in model.parameters()).backward()
        optimizer.step()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("style", ["optimizer", "module"])
@everywhere
def test_rank_0_warns_once_of_parameters_that_differ(style: str) -> None:
    found = warned(lambda: train(style, float(hvd.rank())))
    assert len(found) == (hvd.rank() == 0)
    assert all("different values of '1.weight', and will train different models" in text for text in found)


@pytest.mark.ranks(2, 3)
@everywhere
def test_rank_0_warns_of_another_learning_rate() -> None:
    found = warned(lambda: train("optimizer", 1.0, rate=0.1 * (1 + (hvd.rank() == 1))))
    assert len(found) == (hvd.rank() == 0)
    assert all("different values of lr of the parameter groups, and" in text for text in found)


@pytest.mark.parametrize("style", ["optimizer", "module"])
@everywhere
def test_an_equal_start_is_silent(style: str) -> None:
    assert warned(lambda: train(style, 1.0)) == []


@pytest.mark.ranks(2, 3)
@everywhere
def test_one_rank_may_have_loaded_a_state() -> None:
    def run() -> None:
        plain = OneOption([nn.Parameter(torch.ones(1))], {"lr": 1.0})
        if hvd.rank() == 0:
            plain.load_state_dict(plain.state_dict())  # adds `differentiable` to its defaults
        optimizer = hvd.DistributedOptimizer(plain)
        optimizer.param_groups[0]["params"][0].sum().backward()
        optimizer.step()

    assert warned(run) == []


class OneOption(torch.optim.Optimizer):
    """An optimizer that has not all options of torch's own ones."""

    def step(self, closure: Any = None) -> Any:
        pass


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_rank_that_joined_before_the_first_step_trains_later() -> None:
    def run() -> None:
        weight = train_and_join(1, int(hvd.rank() == 0), broadcasts=True)
        assert weight.flatten().tolist() == pytest.approx([1 - 1 / hvd.size() - 1] * 2)

    assert warned(run) == []


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("style", ["optimizer", "module"])
@everywhere
def test_rank_0_warns_of_steps_that_a_rank_has_missed_after_join(style: str) -> None:
    found = warned(lambda: train_and_join(1, 1 + (hvd.rank() != 0), style=style))
    assert len(found) == (hvd.rank() == 0)
    assert all("different values of 'weight', and will train different models" in text for text in found)
    assert warned(lambda: train_and_join(1, 1 + (hvd.rank() != 0), broadcasts=True, style=style)) == []
    assert warned(lambda: train_and_join(2, 2, 2, style=style)) == []  # in step: nothing to broadcast


def train_and_join(
    last: int, *batches: int, broadcasts: bool = False, style: str = "optimizer"
) -> torch.Tensor:
    """Train for epochs with so many batches on this rank, and one with `last`; join after each. Return the weight."""
    model: Any = nn.Linear(2, 1, bias=False)
    weight = nn.init.ones_(model.weight)
    optimizer: Any = torch.optim.SGD([weight], lr=1.0)
    if style == "optimizer":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    else:
        model = hvd.DistributedDataParallel(model)
    for count in (*batches, last):
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).backward()
            optimizer.step()
        root = hvd.join()
        if broadcasts:
            hvd.broadcast_parameters([weight], root)
    return weight


@everywhere
def test_options_that_are_no_numbers_are_left_out() -> None:
    def run() -> None:
        weight = nn.Parameter(torch.ones(2))
        options: Any = {"params": [weight], "weights": torch.ones(3), "function": object()}
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([options], lr=1.0))
        weight.sum().backward()
        optimizer.step()

    assert warned(run) == []
