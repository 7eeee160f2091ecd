"""How far rounding alone can take a training from its reference, on any processor.

Two correct processes differ in the order of their sums and in where a fused multiply-add rounds once instead of twice.
A sum of n products that is computed in any order, with or without fused operations, is the exact sum for factors that
are changed by at most gamma_n = n u / (1 - n u), relative to each (Higham, Accuracy and Stability of Numerical
Algorithms, 2nd edition, section 3.1; u: the unit roundoff, half the distance from 1 to the next number). For long sums
lambda sqrt(n) u holds instead of n u, but for a probability of 2 exp(-lambda^2 / 2) (Higham and Mary 2019, SIAM Journal
on Scientific Computing 41(5), A2815). So a step of training computes the exact result of nearby weights, inputs and
gradients.

What such changes do to the result of a training is measured: train several times with every weight, input and gradient
changed at random in every step, by at most twice that much, since two processes differ, and take the largest deviation.
Rounding errors seldom all point one way, so such a bound is some ten times what is seen. Under autocast a difference in
float32 now and then rounds to another number of low precision; the changed trainings do that as well, and more often.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

_LAMBDA = 6.0
"""A sum exceeds the bound of long sums with a probability of 3e-8."""


def largest_change(terms: int, dtype: torch.dtype) -> float:
    """Return by how much, relatively, the factors of a sum of `terms` products in `dtype` may be changed."""
    return min(terms, _LAMBDA * math.sqrt(terms)) * torch.finfo(dtype).eps  # eps is 2 u


def change_at_random(
    networks: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], most: float, seed: int
) -> None:
    """Change every input, gradient and weight by at most `most` times itself in each step from now on."""
    generator = torch.Generator().manual_seed(seed)

    def changed(*tensors: torch.Tensor) -> list[torch.Tensor]:
        sizes = [tensor.numel() for tensor in tensors]
        noise = torch.rand(sum(sizes), generator=generator, dtype=torch.float64).mul_(2).sub_(1)
        return [
            (tensor.double() * (1 + most * part.view(tensor.shape))).to(tensor.dtype)
            for tensor, part in zip(tensors, noise.split(sizes), strict=True)
        ]

    def change_inputs(network: nn.Module, inputs: Any) -> Any:
        return tuple(changed(*inputs))

    def change_all(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        tensors = [*params, *(param.grad for param in params if param.grad is not None)]
        with torch.no_grad():
            torch._foreach_copy_(tensors, changed(*tensors))

    for network in networks:
        network.register_forward_pre_hook(change_inputs)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(change_all)
