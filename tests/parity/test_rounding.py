"""The bounds on rounding are small enough to show every mistake in a gradient."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from .loop import SCENARIOS, Pieces, Scenario, alone, train
from .rounding import bounds, expected, shares
from .test_training import DTYPES, check

pytestmark = pytest.mark.only_ci

SIZE, STEP = 2, 7
"""The number of ranks whose rows are used, and the backward from which on a mistake happens."""

Mistake = Callable[[list[nn.Parameter], int], None]
"""(parameters, how many backwards of this optimizer came before) -> gradients with a mistake."""


def _divide_by_one_rank_more(params: list[nn.Parameter], number: int) -> None:
    for param in params:
        if param.grad is not None:
            param.grad *= SIZE / (SIZE + 1)


def _count_a_gradient_twice(params: list[nn.Parameter], number: int) -> None:
    if number >= STEP and params[-1].grad is not None:
        params[-1].grad *= 2


def _leave_the_last_gradient(params: list[nn.Parameter], number: int) -> None:
    """Use the gradient of the step before, as when a bucket was not copied in time."""
    last: Any = params[-1]
    before, last.before = getattr(last, "before", None), last.grad.clone()
    if number >= STEP:
        last.grad = before


def _mistaken(mistake: Mistake, networks: list[nn.Module], scenario: Scenario) -> Pieces:
    pieces = alone(networks, scenario)
    counts: dict[int, int] = {}

    def average(optimizer: torch.optim.Optimizer, count: int) -> None:
        pieces.average(optimizer, count)
        number = counts[id(optimizer)] = counts.get(id(optimizer), -1) + 1
        used = [param for param in optimizer.param_groups[0]["params"] if param.grad is not None]
        mistake(used, number)

    return dataclasses.replace(pieces, average=average)


MISTAKES = {
    "divides-by-one-rank-more": _divide_by_one_rank_more,
    "counts-a-gradient-twice": _count_a_gradient_twice,
    "leaves-the-last-gradient": _leave_the_last_gradient,
}
INVISIBLE = {("clip", "divides-by-one-rank-more")}
"""Clipping to a norm removes a factor that all gradients share."""

CASES = [(name, mistake) for name in SCENARIOS for mistake in MISTAKES if (name, mistake) not in INVISIBLE]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "mistake"), CASES)
def test_a_mistake_in_a_gradient_is_more_than_rounding(name: str, mistake: str, dtype: torch.dtype) -> None:
    scenario = SCENARIOS[name]
    style = functools.partial(_mistaken, MISTAKES[mistake])
    outcome = train(scenario, style, dtype, SIZE, shares(scenario, SIZE))
    with pytest.raises(AssertionError, match="more than"):
        check(outcome.gradients, expected(name, SIZE, dtype).gradients, bounds(name, SIZE, dtype).gradients)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_rank_left_out_is_more_than_rounding(name: str, dtype: torch.dtype) -> None:
    outcome = train(SCENARIOS[name], alone, dtype, SIZE, [[0]])
    with pytest.raises(AssertionError, match=r"more than|isfinite"):
        check(outcome.state, expected(name, SIZE, dtype).state, bounds(name, SIZE, dtype).state)
