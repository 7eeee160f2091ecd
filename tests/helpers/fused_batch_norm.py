"""Doubles, on the CPU, of torch's fused kernels for SyncBatchNorm, which exist on GPUs alone.

They do the arithmetic of aten/src/ATen/native/cuda/Normalization.cuh, also for counts of 0, and refuse what those
kernels refuse: other dtypes and layouts. They record their calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dualdist.training import batch_norm_kernels, sync_batch_norm

__all__ = ("fused_kernels",)


@contextlib.contextmanager
def fused_kernels() -> Iterator[list[str]]:
    """Let SyncBatchNorm use the doubles in the `with` block. Yields the names of the kernels that it calls."""
    called: list[str] = []

    def recorded(double: Any) -> Any:
        def call(*args: Any) -> Any:
            called.append(double.__name__)
            return double(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for double in (
            batch_norm_stats,
            batch_norm_gather_stats_with_counts,
            batch_norm_elemt,
            batch_norm_backward_reduce,
            batch_norm_backward_elemt,
        ):
            patch.setattr(torch, double.__name__, recorded(double))
        patch.setattr(sync_batch_norm, "kernels_for", lambda input: batch_norm_kernels._FUSED)
        yield called


def batch_norm_stats(input: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    check_layout(input)
    var, mean = torch.var_mean(input.to(accumulated(input)), channels_left(input), correction=0)
    return mean, (var + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    input: torch.Tensor,
    means: torch.Tensor,
    spreads: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert {t.dtype for t in (means, spreads, running_mean, running_var, counts)} == {accumulated(input)}
    mean, var, total = torch.zeros_like(means[0]), torch.zeros_like(means[0]), torch.zeros_like(counts[0])
    for other, spread, count in zip(means, spreads, counts, strict=True):
        squares = ((1 / spread).square() - eps) * count
        factor = 1 / (total + count)
        var += squares + (mean - other).square() * total * count * factor
        mean = total * factor * mean + count * factor * other
        total = total + count
    running_mean.mul_(1 - momentum).add_(momentum * mean)
    running_var.mul_(1 - momentum).add_(momentum * var / (total - 1))
    return mean, (var / total + eps).rsqrt()


def batch_norm_elemt(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    check_layout(input)
    check_parameters(input, weight, bias)
    scale, shift = (
        value if value is None else spread_out(value.to(mean.dtype), input) for value in (weight, bias)
    )
    normal = (input.to(mean.dtype) - spread_out(mean, input)) * spread_out(invstd, input)
    return (normal * (1 if scale is None else scale) + (0 if shift is None else shift)).to(input.dtype)


def batch_norm_backward_reduce(
    grad: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    needs_input: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[torch.Tensor | None, ...]:
    check_layout(input)
    check_parameters(input, weight)
    assert grad.dtype == input.dtype and grad.stride() == input.stride()
    total = grad.to(mean.dtype).sum(channels_left(input))
    product = (grad.to(mean.dtype) * (input.to(mean.dtype) - spread_out(mean, input))).sum(
        channels_left(input)
    )
    dtype = input.dtype if weight is None else weight.dtype
    return (
        total if needs_input else None,
        product if needs_input else None,
        (product * invstd).to(dtype) if needs_weight else None,
        total.to(dtype) if needs_bias else None,
    )


def batch_norm_backward_elemt(
    grad: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    sum_grad: torch.Tensor,
    sum_product: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    check_layout(input)
    assert counts.dtype == torch.int32 and grad.stride() == input.stride()
    assert weight is None or weight.dtype == mean.dtype
    total = counts.sum()
    slope = spread_out(sum_product / total * invstd.square(), input)
    deviation = input.to(mean.dtype) - spread_out(mean, input)
    factor = spread_out(invstd if weight is None else invstd * weight, input)
    made = (grad.to(mean.dtype) - spread_out(sum_grad / total, input) - deviation * slope) * factor
    return made.to(input.dtype)


def accumulated(input: torch.Tensor) -> torch.dtype:
    return torch.float64 if input.dtype is torch.float64 else torch.float32


def check_layout(input: torch.Tensor) -> None:
    assert input.numel() > 0
    layouts = [
        torch.contiguous_format,
        *{4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(input.dim(), []),
    ]
    assert any(input.is_contiguous(memory_format=layout) for layout in layouts)


def check_parameters(input: torch.Tensor, *params: torch.Tensor | None) -> None:
    for param in params:
        assert param is None or param.dtype in (input.dtype, accumulated(input))


def channels_left(input: torch.Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


def spread_out(values: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return values.view([-1 if dim == 1 else 1 for dim in range(input.dim())])
