"""A warning by name when ranks start from different parameters or options."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.rejoining import outside_world
from ..helpers.styles import distributed
from ..helpers.world import everywhere


@contextlib.contextmanager
def comparing() -> Iterator[Callable[[Callable[[], object]], list[str]]]:
    """Be in a world that compares the start. Yields a function that runs a training and returns its warnings here."""

    def warned(train: Callable[[], object]) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            train()
        return [text for one in found if "The ranks start" in (text := str(one.message))]

    with outside_world():
        with mock.patch.dict(os.environ, DUALDIST_COMPARE_START="1"):
            hvd.init()
        yield warned
        hvd.shutdown()


def check_warning(found: list[str], what: str) -> None:
    """Check that rank 0 alone has warned, once, of different values of `what`."""
    assert len(found) == (hvd.rank() == 0)
    assert all(f"different values of {what}" in text for text in found)


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
@everywhere
def test_rank_0_warns_once_of_parameters_or_learning_rates_that_differ() -> None:
    with comparing() as warned:
        for style in ("optimizer", "module"):
            found = warned(functools.partial(train, style, float(hvd.rank())))
            check_warning(found, "'1.weight', and will train different models")
        found = warned(lambda: train("optimizer", 1.0, rate=0.1 * (1 + (hvd.rank() == 1))))
        check_warning(found, "lr of the parameter groups, and")


class OneOption(torch.optim.Optimizer):
    """An optimizer that has not all options of torch's own ones."""

    def step(self, closure: Any = None) -> Any:
        pass


def load_on_rank_0(options: Any = None) -> None:
    plain = OneOption([nn.Parameter(torch.ones(1))], {"lr": 1.0})
    plain.param_groups[0].update(options or {})
    if hvd.rank() == 0:
        plain.load_state_dict(plain.state_dict())  # adds `differentiable` to its defaults
    optimizer = hvd.DistributedOptimizer(plain)
    optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()


def have_other_options() -> None:
    weight = nn.Parameter(torch.ones(2))
    options: Any = {"params": [weight], "weights": torch.ones(3), "function": object()}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([options], lr=1.0))
    weight.sum().backward()
    optimizer.step()


SILENT: dict[str, Callable[[], object]] = {
    "equal, optimizer": lambda: train("optimizer", 1.0),
    "equal, module": lambda: train("module", 1.0),
    "one rank has loaded a state": load_on_rank_0,
    "one rank has loaded a state, groups of another optimizer": lambda: load_on_rank_0({"differentiable": False}),
    "options that are no numbers": have_other_options,
}


@everywhere
def test_an_equal_start_is_silent() -> None:
    with comparing() as warned:
        assert {name: found for name, run in SILENT.items() if (found := warned(run))} == {}


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_rank_that_joined_before_the_first_step_trains_later() -> None:
    def run() -> None:
        weight = train_and_join(1, int(hvd.rank() == 0), broadcasts=True)
        assert weight.flatten().tolist() == pytest.approx([1 - 1 / hvd.size() - 1] * 2)

    with comparing() as warned:
        assert warned(run) == []


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("style", ["optimizer", "module"])
@everywhere
def test_rank_0_warns_of_steps_that_a_rank_has_missed_after_join(style: str) -> None:
    uneven = 1 + (hvd.rank() != 0)
    with comparing() as warned:
        found = warned(lambda: train_and_join(1, uneven, style=style))
        check_warning(found, "'weight', and will train different models")
        assert warned(lambda: train_and_join(1, uneven, broadcasts=True, style=style)) == []
        assert warned(lambda: train_and_join(2, 2, 2, style=style)) == []  # in step: nothing to broadcast


def train_and_join(last: int, *batches: int, broadcasts: bool = False, style: str = "optimizer") -> torch.Tensor:
    """Train for epochs with so many batches on this rank, and one with `last`; join after each. Return the weight."""
    model: Any = nn.Linear(2, 1, bias=False)
    weight = nn.init.ones_(model.weight)
    model, optimizer = distributed(style, model, torch.optim.SGD([weight], lr=1.0))
    for count in (*batches, last):
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).backward()
            optimizer.step()
        root = hvd.join()
        if broadcasts:
            hvd.broadcast_parameters([weight], root)
    return weight
