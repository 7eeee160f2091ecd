"""Twenty steps in every style on every engine come to what one process with the whole batch comes to."""

from __future__ import annotations

import functools

import pytest
import torch

import dualdist as hvd

from ..helpers.world import World
from .loop import SCENARIOS, STEPS, STYLES, Outcome, alone, train

pytestmark = pytest.mark.ranks(2, 3)

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Relative to the largest number of a parameter, and of its gradients."""


@functools.cache
def expected(name: str, size: int, dtype: torch.dtype) -> Outcome:
    """Return what this process comes to by itself, with the whole batch.

    Low precision rounds the sum over each rank's rows, so there the rows of one rank come after the other's.
    """
    scenario = SCENARIOS[name]
    together = [list(range(size))] if scenario.autocast is None else [[rank] for rank in range(size)]
    return train(scenario, alone, dtype, size, together)


def on_rank(name: str, style: str, dtype: torch.dtype) -> Outcome:
    return train(SCENARIOS[name], STYLES[style], dtype, hvd.size(), [[hvd.rank()]])


@functools.cache
def first_of_two_ranks(name: str) -> list[Outcome]:
    """Return where the outcome of the first world of two ranks and the first style is kept for all others."""
    return []


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_training_is_that_of_one_process(world: World, name: str, style: str, dtype: torch.dtype) -> None:
    oracle = expected(name, world.size, dtype)
    outcomes = world.run(on_rank, name, style, dtype)
    for rank, outcome in enumerate(outcomes):
        assert outcome.scales == oracle.scales[: len(outcome.scales)], rank
        check(outcome.state, oracle.state, TOLERANCES[dtype])
        steps = STEPS - (SCENARIOS[name].uneven and rank > 0)
        done = {key: grad[:steps] for key, grad in oracle.gradients.items()}
        check(outcome.gradients, done, TOLERANCES[dtype])
    if world.size == 2 and dtype is torch.float32:
        check_bitwise(outcomes[0], (first_of_two_ranks(name) + outcomes)[0])
        first_of_two_ranks(name).append(outcomes[0])


def check_bitwise(found: Outcome, first: Outcome) -> None:
    """Check that two engines, or two styles, came to the very same numbers: the sum of two has no order."""
    for ours, theirs in ((found.state, first.state), (found.gradients, first.gradients)):
        different = [
            name
            for name, tensor in ours.items()
            if tensor.numpy().tobytes() != theirs[name].numpy().tobytes()
        ]
        assert not different


def check(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    """Check that numbers are equal but for `tolerance` of the largest, and infinite where expected."""
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        finite = want.isfinite()
        assert torch.equal(found[name].isfinite(), finite), name
        error, scale = ((each[finite].abs().max()) for each in (found[name] - want, want))
        assert error <= tolerance * scale, (name, error / scale)
