"""How far rounding alone can take a training from its reference, on any processor.

Two correct processes differ in the order of their sums and in where a fused multiply-add rounds once instead of twice.
A sum of n products that is computed in any order, with or without fused operations, is the exact sum for factors that
are changed by at most gamma_n = n u / (1 - n u), relative to each (Higham, Accuracy and Stability of Numerical
Algorithms, 2nd edition, section 3.1; u: the unit roundoff, half the distance from 1 to the next number). So a step of
training computes the exact result of nearby weights, inputs and gradients, at most gamma_n away.

What such changes do to the result of twenty steps is measured: `bounds` trains several times with every weight, input
and gradient changed at random by at most 2 gamma_n in every step, since two processes differ, and takes the largest
deviation of each parameter. Rounding errors seldom all point one way, as they do in gamma_n, so the bound is some ten
times what is seen. Under autocast a difference in float32 now and then rounds to another number of low precision; the
changed trainings do that as well, and more often.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .loop import ROWS, SCENARIOS, Outcome, Pieces, Scenario, alone, train

__all__ = ("bounds", "deviation", "expected", "shares")

RUNS = 16
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
    terms = ROWS * size * scenario.micro_batches + 1
    change = terms * torch.finfo(dtype).eps
    runs = [
        train(scenario, functools.partial(_perturbed, seed, change), dtype, size, shares(scenario, size))
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


def _perturbed(seed: int, most: float, networks: list[nn.Module], scenario: Scenario) -> Pieces:
    """Train alone with every input, gradient and weight changed by at most `most` times itself in each step."""
    pieces = alone(networks, scenario)
    generator = torch.Generator().manual_seed(seed)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return (tensor.double() * (1 + most * noise)).to(tensor.dtype)

    def change_input(network: nn.Module, inputs: Any) -> Any:
        return tuple(change(tensor) for tensor in inputs)

    def change_all(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for param in optimizer.param_groups[0]["params"]:
                param.copy_(change(param))
                if param.grad is not None:
                    param.grad.copy_(change(param.grad))

    for network in networks:
        network.register_forward_pre_hook(change_input)
    for optimizer in pieces.optimizers:
        optimizer.register_step_pre_hook(change_all)
    return pieces
