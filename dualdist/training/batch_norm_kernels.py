"""The arithmetic of SyncBatchNorm on one rank: torch's fused kernels where the device has them, else portable code.

Both send count, mean and spread of each channel and combine those of all ranks. This avoids the cancellation in sums of
squares: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979
(Stanford STAN-CS-79-773).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

Sums = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class Statistics(NamedTuple):
    """The statistics of each channel over all ranks, on the device of the input. The host reads none of them."""

    mean: torch.Tensor
    """(C,)"""
    invstd: torch.Tensor
    """(C,), 1 / sqrt(biased variance + eps)."""
    unbiased: torch.Tensor
    """(C,), the unbiased variance."""
    counts: torch.Tensor
    """Values per channel of each rank: (size,)."""
    var_plus_eps: torch.Tensor | None = None
    """(C,), of the biased variance; None if the kernels do not use it."""


class Kernels(ABC):
    """What SyncBatchNorm computes without the other ranks. The input is (N, C, ...); N may be 0."""

    @abstractmethod
    def row(self, input: torch.Tensor, eps: float) -> torch.Tensor:
        """Return what the rank sends in forward: (2C + 1,), the last one its number of values per channel."""

    @abstractmethod
    def combine(self, rows: torch.Tensor, input: torch.Tensor, eps: float) -> Statistics:
        """Return the statistics from the `rows` of all ranks, (size, 2C + 1)."""

    @abstractmethod
    def normalize(
        self,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        found: Statistics,
        eps: float,
    ) -> torch.Tensor:
        """Return the output, with the shape, dtype and layout of `input`."""

    @abstractmethod
    def sums(
        self, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, found: Statistics
    ) -> Sums:
        """Return what the rank sends in backward, (2C,), and its gradients of weight and bias."""

    @abstractmethod
    def grad_input(
        self,
        grad: torch.Tensor,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        found: Statistics,
        total: torch.Tensor,
    ) -> torch.Tensor:
        """Return the gradient of `input` from the sum `total` of what all ranks have sent in backward."""


class _Portable(Kernels):
    """Kernels of torch's plain BatchNorm: one pass for each sum, and one or two for each result.

    Rows of forward are float64, which keeps the count exact. Rows are short, so the number of operations (about 8 us
    each in a training step) costs time, not their length.
    """

    def row(self, input: torch.Tensor, eps: float) -> torch.Tensor:
        channels = input.shape[1]
        count = torch.full((1,), input.numel() // channels, dtype=torch.float64, device=input.device)
        if not input.numel():
            return torch.cat([count.new_zeros(2 * channels), count])
        # Faster than var_mean by a factor of 5 on the CPU.
        mean, var = torch.batch_norm_update_stats(input.to(compute_dtype(input)), None, None, 0.0)
        return torch.cat([mean, var, count])

    def combine(self, rows: torch.Tensor, input: torch.Tensor, eps: float) -> Statistics:
        channels = input.shape[1]
        means, variances, counts = rows.split([channels, channels, 1], dim=1)
        total = counts.sum()
        shares = counts / total
        mean = (shares * means).sum(dim=0)
        biased = (shares * (variances + (means - mean).square())).sum(dim=0)
        var_plus_eps = biased + eps
        stacked = torch.stack([mean, var_plus_eps.rsqrt(), biased * (total / (total - 1)), var_plus_eps])
        mean, invstd, unbiased, var_plus_eps = stacked.to(compute_dtype(input))
        return Statistics(mean, invstd, unbiased, counts.view(-1), var_plus_eps)

    def normalize(
        self,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        found: Statistics,
        eps: float,
    ) -> torch.Tensor:
        scale, shift = (None if param is None else param.to(found.mean.dtype) for param in (weight, bias))
        return _scaled(input, found, scale, shift)

    def sums(
        self, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, found: Statistics
    ) -> Sums:
        dtype = found.mean.dtype
        if input.numel() == 0:
            zeros = torch.zeros(2 * input.shape[1], dtype=dtype, device=input.device)
            grad_weight, grad_bias = zeros.chunk(2)
            return zeros, grad_weight, grad_bias
        _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad.to(dtype),
            input.to(dtype),
            None,
            None,
            None,
            found.mean,
            found.invstd,
            True,
            0.0,
            [False, True, True],
        )
        return torch.cat([grad_bias, grad_weight]), grad_weight, grad_bias

    def grad_input(
        self,
        grad: torch.Tensor,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        found: Statistics,
        total: torch.Tensor,
    ) -> torch.Tensor:
        dtype = found.mean.dtype
        factor = found.invstd if weight is None else found.invstd * weight.to(dtype)
        # (grad - grad_mean - (input - mean) * invstd * slope) * factor
        shift, slope = ((total / -found.counts.sum()).view(2, -1) * factor).unbind()
        made = _scaled(input.to(dtype), found, slope, shift)
        per_channel = [-1 if dim == 1 else 1 for dim in range(input.dim())]
        return made.addcmul_(grad.to(dtype), factor.view(per_channel)).to(input.dtype)


def _scaled(
    input: torch.Tensor, found: Statistics, scale: torch.Tensor | None, shift: torch.Tensor | None
) -> torch.Tensor:
    """Return (input - mean) * invstd * scale + shift."""
    # torch.nn.functional.batch_norm of some releases refuses an eps of 0.
    return torch.batch_norm(input, scale, shift, found.mean, found.var_plus_eps, False, 0.0, 0.0, False)


class _Fused(Kernels):
    """The kernels of torch.nn.SyncBatchNorm, as torch/nn/modules/_functions.py calls them.

    They read float16 and bfloat16 as they are, and compute in float32. Unlike torch, this removes no rows of ranks
    without values, because the host would wait for their counts.
    """

    def row(self, input: torch.Tensor, eps: float) -> torch.Tensor:
        channels, dtype = input.shape[1], compute_dtype(input)
        count = torch.full((1,), input.numel() // channels, dtype=dtype, device=input.device)
        if input.numel():
            return torch.cat([*torch.batch_norm_stats(_laid_out(input), eps), count])
        # The kernel that combines the rows divides by the spread, also for a count of 0.
        mean = torch.zeros(channels, dtype=dtype, device=input.device)
        return torch.cat([mean, torch.ones_like(mean), count])

    def combine(self, rows: torch.Tensor, input: torch.Tensor, eps: float) -> Statistics:
        channels = input.shape[1]
        # The kernel divides by the count of the rows until now: the first one must not be 0.
        rows = rows[rows[:, -1].argsort(descending=True)]
        means, spreads, counts = rows.split([channels, channels, 1], dim=1)
        # The kernel writes the unbiased variance only as running statistics.
        running_mean, running_var = torch.zeros(2, channels, dtype=rows.dtype, device=rows.device)
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            input, means, spreads, running_mean, running_var, 1.0, eps, counts.view(-1)
        )
        return Statistics(mean, invstd, running_var, counts.view(-1).to(torch.int32))

    def normalize(
        self,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        found: Statistics,
        eps: float,
    ) -> torch.Tensor:
        if not input.numel():
            return torch.empty_like(input)
        scale, shift = (_parameter(param, input) for param in (weight, bias))
        return torch.batch_norm_elemt(_laid_out(input), scale, shift, found.mean, found.invstd, eps)

    def sums(
        self, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, found: Statistics
    ) -> Sums:
        if not input.numel():
            zeros = torch.zeros(2 * input.shape[1], dtype=found.mean.dtype, device=input.device)
            grad_weight, grad_bias = zeros.chunk(2)
            return zeros, grad_weight, grad_bias
        has_weight = weight is not None
        grad, input = _both_laid_out(grad, input)
        scale = _parameter(weight, input)
        sum_grad, sum_product, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
            grad, input, found.mean, found.invstd, scale, True, has_weight, has_weight
        )
        return torch.cat([sum_grad, sum_product]), grad_weight, grad_bias

    def grad_input(
        self,
        grad: torch.Tensor,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        found: Statistics,
        total: torch.Tensor,
    ) -> torch.Tensor:
        if not input.numel():
            return torch.empty_like(input)
        scale = None if weight is None else weight.to(found.mean.dtype)
        grad, input = _both_laid_out(grad, input)
        sum_grad, sum_product = total.chunk(2)
        return torch.batch_norm_backward_elemt(
            grad, input, found.mean, found.invstd, scale, sum_grad, sum_product, found.counts
        )


def compute_dtype(input: torch.Tensor) -> torch.dtype:
    """Return the dtype to compute in."""
    return torch.float64 if input.dtype is torch.float64 else torch.float32


def _parameter(param: torch.Tensor | None, input: torch.Tensor) -> torch.Tensor | None:
    """Return weight or bias as the kernels take it: in the dtype of `input` or the one to compute in."""
    if param is None or param.dtype is input.dtype:
        return param
    return param.to(compute_dtype(input))


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in a layout that the kernels read: channels-last as it is, else contiguous."""
    return tensor.contiguous(memory_format=_layout(tensor))


def _both_laid_out(grad: torch.Tensor, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return grad.contiguous(memory_format=_layout(input)), _laid_out(input)


def _layout(tensor: torch.Tensor) -> torch.memory_format:
    for layout, dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if tensor.dim() == dims and tensor.is_contiguous(memory_format=layout):
            return layout
    return torch.contiguous_format


_FUSED, _PORTABLE = _Fused(), _Portable()


def kernels_for(input: torch.Tensor) -> Kernels:
    """Return the kernels for the device of `input`."""
    return _kernels_of(input.device.type)


@functools.cache  # torch takes 30 us to find a kernel
def _kernels_of(device_type: str) -> Kernels:
    # torch.nn.SyncBatchNorm needs these, too: CUDA, ROCm and XPU have them.
    key = torch._C._dispatch_key_for_device(device_type)
    has_fused = torch._C._dispatch_has_kernel_for_dispatch_key("aten::batch_norm_stats", key)
    return _FUSED if has_fused else _PORTABLE
