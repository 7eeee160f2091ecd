"""Twelve steps in every style on every backend give the result of one process with the whole batch."""

from __future__ import annotations

import functools

import pytest
import torch

import dualdist as hvd

from ..helpers.world import World
from .loop import SCENARIOS, STEPS, STYLES, Outcome, train
from .rounding import bounds, deviation, expected

pytestmark = pytest.mark.ranks(2, 3)

DTYPES = (torch.float64, torch.float32)


def on_rank(name: str, style: str, dtype: torch.dtype) -> Outcome:
    return train(SCENARIOS[name], STYLES[style], dtype, hvd.size(), [[hvd.rank()]])


@functools.cache
def first_of_two_ranks(name: str) -> list[Outcome]:
    """Return a list that keeps the outcome of the first world of two ranks and of the first style."""
    return []


@pytest.mark.only_ci(where=lambda world, dtype: world == "torch-gloo-2" and dtype == torch.float32)
@pytest.mark.only_ci(where=lambda world, dtype: world == "horovod-gloo-2" and dtype == torch.float64)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_training_is_that_of_one_process(world: World, name: str, style: str, dtype: torch.dtype) -> None:
    oracle, bound = expected(name, world.size, dtype), bounds(name, world.size, dtype)
    outcomes = world.run(on_rank, name, style, dtype)
    for rank, outcome in enumerate(outcomes):
        assert outcome.scales == oracle.scales[: len(outcome.scales)], rank
        check(outcome.state, oracle.state, bound.state)
        steps = STEPS - (SCENARIOS[name].uneven and rank > 0)
        done = {key: grad[:steps] for key, grad in oracle.gradients.items()}
        check(outcome.gradients, done, bound.gradients)
    if world.size == 2 and dtype is torch.float32:
        check_bitwise(outcomes[0], (first_of_two_ranks(name) + outcomes)[0])
        first_of_two_ranks(name).append(outcomes[0])


def check_bitwise(found: Outcome, first: Outcome) -> None:
    """Check that two backends, or two styles, gave identical numbers: a sum of two numbers has only one order."""
    for ours, theirs in ((found.state, first.state), (found.gradients, first.gradients)):
        different = [
            name for name, tensor in ours.items() if tensor.numpy().tobytes() != theirs[name].numpy().tobytes()
        ]
        assert not different


def check(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], bound: dict[str, torch.Tensor]) -> None:
    """Check that numbers differ by rounding at most, and are infinite where expected."""
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        assert torch.equal(found[name].isfinite(), want.isfinite()), name
        error = deviation(found[name], want)
        assert error <= bound[name], f"{name} differs by {error:.2e}, more than {bound[name]:.2e}"
