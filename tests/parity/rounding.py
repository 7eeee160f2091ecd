"""The results that trainings in tests/parity must have, and the bounds that rounding sets; see helpers/rounding.py."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from ..helpers.rounding import change_at_random, largest_change
from .loop import ROWS, SCENARIOS, Outcome, Pieces, Scenario, alone, train

RUNS = 8
"""Trainings with random changes."""


@functools.cache
def expected(name: str, size: int, dtype: torch.dtype) -> Outcome:
    """Return the result of this process alone, with the whole batch.

    Low precision rounds the sum over the rows of each rank, so there the ranks' rows are processed one rank at a time.
    """
    return train(SCENARIOS[name], alone, dtype, size, shares(SCENARIOS[name], size))


def shares(scenario: Scenario, size: int) -> list[list[int]]:
    """Return the ranks whose rows go through the networks together."""
    return [list(range(size))] if scenario.autocast is None else [[rank] for rank in range(size)]


@functools.cache
def bounds(name: str, size: int, dtype: torch.dtype) -> Outcome:
    """Return the largest difference from `expected` that rounding explains, by name as there (0-dim tensors)."""
    scenario = SCENARIOS[name]
    reference = expected(name, size, dtype)
    most = largest_change(ROWS * size * scenario.micro_batches + 1, dtype)
    runs = [
        train(scenario, functools.partial(_changed, seed, most), dtype, size, shares(scenario, size))
        for seed in range(RUNS)
    ]

    def deviations(part: Callable[[Outcome], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {
            key: torch.stack([deviation(part(run)[key], want) for run in runs]).max()
            for key, want in part(reference).items()
        }

    return Outcome(deviations(lambda run: run.gradients), deviations(lambda run: run.state), [])


def deviation(found: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Return the largest difference of two tensors (0-dim), where `want` is finite."""
    finite = want.isfinite()
    return (found - want)[finite].abs().max() if finite.any() else torch.zeros((), dtype=want.dtype)


def _changed(seed: int, most: float, networks: list[nn.Module], scenario: Scenario) -> Pieces:
    """Train alone with random changes."""
    pieces = alone(networks, scenario)
    change_at_random(networks, pieces.optimizers, most, seed)
    return pieces
