"""Batch normalization over the batches of all ranks, on any backend and device.

One collective in forward, one in backward; collectives/rows.py runs them. batch_norm_kernels.py computes.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from ..agreement import call_kinds
from ..backends.torch_interface import ranks_of
from ..checks import flag, instance, integer, number, wrong
from ..collectives.allreduce import allreduce
from ..collectives.rows import gather_rows, sum_rows
from ..compiling import not_compiled
from ..types import Sum
from ..world.process_sets import ProcessSet, check_process_set, global_process_set, reporting
from .batch_norm_kernels import Kernels, Statistics, compute_dtype, kernels_for
from .devices import checked_device
from .process_groups import set_of_group

__all__ = ("SyncBatchNorm",)

_Layer = TypeVar("_Layer", bound=_BatchNorm)


class SyncBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d and 3d with the statistics of all ranks' batches in training.

    Forward in training and backward are collective: every member of `process_set` must run them, in the same order,
    even with an empty batch. In evaluation each rank computes alone. The gradients of weight and bias are this rank's
    share of the sum, as in torch.nn.SyncBatchNorm: `DistributedOptimizer` combines them like all other gradients.

    Args:
        num_features: C of the input, which is (N, C) or (N, C, ...) with up to three more dimensions; N may differ
            between ranks and be 0. Any floating-point dtype, device and memory layout.
        eps, momentum, affine, track_running_stats: as in torch.nn.BatchNorm2d.
        process_set: the ranks that share statistics.
        process_group: the same by torch's name: a ProcessSet, or a process group of torch.
        device, dtype: of weight, bias and running statistics.

    Raises, in forward:
        ValueError: the input has a wrong shape, or all ranks together have fewer than two values per channel.
        HorovodInternalError: as for `allgather`.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        *,
        process_set: ProcessSet = global_process_set,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        process_set = _chosen_set(process_set, process_group)
        super().__init__(
            integer("num_features", num_features, least=1, below=1 << 31),
            number("eps", eps, least=0),
            momentum if momentum is None else number("momentum", momentum, least=0, most=1),
            flag("affine", affine),
            flag("track_running_stats", track_running_stats),
            device=None if device is None else checked_device("device", device),
            dtype=_checked_dtype(dtype),
        )
        self.process_set = process_set
        self._origin: type[_BatchNorm] | None = None
        """The class of the layer that `convert_sync_batchnorm` replaced by this one."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        instance("input", input, torch.Tensor, "a torch.Tensor", "Pass the input of the layer.")
        if not 2 <= input.dim() <= 5 or input.shape[1] != self.num_features:
            raise ValueError(
                f"`input` must be (N, {self.num_features}) with up to three more dimensions, "
                f"but is {tuple(input.shape)} instead. Look at the layer before it."
            )

    @not_compiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalized `input`, of the same shape, dtype and layout. Collective in training."""
        if not self.training:
            self._check_input_dim(input)
            return functional.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.running_mean is None,
                0.0,
                self.eps,
            )
        with reporting(call_kinds.SYNC_BATCH_NORM, self.process_set):
            self._check_input_dim(input)
        found = _statistics(input, kernels_for(input), self.eps, self.process_set)
        self._track(found)
        output: torch.Tensor = _Normalize.apply(
            input, self.weight, self.bias, found, self.eps, self.process_set
        )
        return output

    @torch.no_grad()
    def _track(self, found: Statistics) -> None:
        """Update the running statistics."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        # On the device, so that the host does not wait for it.
        share = (
            self.num_batches_tracked.to(found.mean.dtype).reciprocal()
            if self.momentum is None
            else self.momentum
        )
        for running, new in ((self.running_mean, found.mean), (self.running_var, found.unbiased)):
            running.copy_(running.to(new.dtype).lerp(new, share))

    @classmethod
    def convert_sync_batchnorm(
        cls,
        module: torch.nn.Module,
        process_set: ProcessSet = global_process_set,
        process_group: Any = None,
    ) -> torch.nn.Module:
        """Return `module` with every BatchNorm layer in it replaced by a SyncBatchNorm with its parameters and state.

        Like torch.nn.SyncBatchNorm.convert_sync_batchnorm: the module itself changes, unless it is such a layer. Call
        it before or after you create the optimizer: parameters stay the same objects. Local.
        """
        instance("module", module, torch.nn.Module, "a torch.nn.Module", "Pass the model.")
        process_set = _chosen_set(process_set, process_group)
        for layer in module.modules():
            is_lazy = isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params()
            if is_lazy and isinstance(layer, _BatchNorm):
                raise ValueError(
                    f"`module` must have initialized layers, but has a {type(layer).__name__} without a shape. Run a "
                    "forward first."
                )
        if isinstance(module, _BatchNorm):
            return cls._like(module, process_set)
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_set))
        return module

    @classmethod
    def revert_sync_batchnorm(cls, module: torch.nn.Module) -> torch.nn.Module:
        """Return `module` with every SyncBatchNorm replaced by a layer of its earlier class, with parameters and state.

        The inverse of `convert_sync_batchnorm`, for evaluation or export without dualdist. Local. Raises ValueError for
        a layer that `convert_sync_batchnorm` did not make: its number of dimensions is unknown.
        """
        instance("module", module, torch.nn.Module, "a torch.nn.Module", "Pass the model.")
        if isinstance(module, cls):
            return module._reverted()
        for name, child in module.named_children():
            setattr(module, name, cls.revert_sync_batchnorm(child))
        return module

    def _reverted(self) -> _BatchNorm:
        if self._origin is None:
            raise ValueError(
                "`module` must have layers that convert_sync_batchnorm() made, but has a SyncBatchNorm that was "
                "created directly instead. Make a BatchNorm1d, 2d or 3d and load its state_dict()."
            )
        made = self._origin(
            self.num_features, self.eps, self.momentum, self.affine, self.track_running_stats, device="meta"
        )
        return _filled(made, self)

    @classmethod
    def _like(cls, layer: _BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
        made = cls(
            layer.num_features,
            layer.eps,
            layer.momentum,
            layer.affine,
            layer.track_running_stats,
            process_set=process_set,
            device="meta",
        )
        made._origin = layer._origin if isinstance(layer, cls) else type(layer)
        return _filled(made, layer)


def _chosen_set(process_set: Any, process_group: Any) -> ProcessSet:
    """Return the process set that one of the two arguments means. `process_set` may be a group of torch, too."""
    if ranks_of(process_set) is not None:
        return set_of_group(process_set, registered=False)
    check_process_set(process_set)
    if process_group is None:
        return process_set  # type: ignore[no-any-return]
    if process_set is not global_process_set:
        raise ValueError(
            "`process_group` must be None if `process_set` is passed, but is not. Pass one of them."
        )
    return set_of_group(process_group, registered=False)


def _checked_dtype(dtype: Any) -> torch.dtype | None:
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    raise wrong("dtype", "a floating-point torch.dtype or None", dtype, "Pass torch.float32.", TypeError)


def _filled(made: _Layer, layer: _BatchNorm) -> _Layer:
    """Give `made` the parameters, buffers and mode of `layer`."""
    made.weight, made.bias = layer.weight, layer.bias
    for name, buffer in layer.named_buffers(recurse=False):
        setattr(made, name, buffer)
    return made.train(layer.training)


@torch.no_grad()
def _statistics(input: torch.Tensor, kernels: Kernels, eps: float, process_set: ProcessSet) -> Statistics:
    """Return the statistics of the batches of all ranks. Collective over `process_set`."""
    rows = gather_rows(kernels.row(input, eps), "statistics", process_set)
    if input.numel() // input.shape[1] < 2 and (total := rows[:, -1].sum()).item() < 2:
        raise ValueError(
            f"`input` must have at least two values per channel over all ranks in training, but has "
            f"{int(total)} instead."
        )
    return kernels.combine(rows, input, eps)


class _Normalize(torch.autograd.Function):
    """Normalization by statistics that depend on this rank's input."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        found: Statistics,
        eps: float,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight, *found)
        ctx.eps, ctx.process_set = eps, process_set
        return kernels_for(input).normalize(input, weight, bias, found, eps)

    @staticmethod
    @not_compiled
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        input, weight, *tensors = ctx.saved_tensors
        kernels, found = kernels_for(input), Statistics(*tensors)
        if torch.is_grad_enabled():  # create_graph=True
            total = found.counts.sum()
            return *_differentiable_grads(ctx, grad, input, weight, total), None, None, None
        own, grad_weight, grad_bias = kernels.sums(grad, input, weight, found)
        grad_input = None
        if ctx.needs_input_grad[0]:
            total = sum_rows(own, "gradients", ctx.process_set)
            grad_input = kernels.grad_input(grad, input, weight, found, total)
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        return (
            grad_input,
            grad_weight if needs_weight else None,
            grad_bias if needs_bias else None,
            None,
            None,
            None,
        )


def _differentiable_grads(
    ctx: Any, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, total: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of input, weight and bias by operations that autograd records. Collective.

    total: values per channel over all ranks.
    """
    dims = [dim for dim in range(input.dim()) if dim != 1]
    per_channel = [-1 if dim == 1 else 1 for dim in range(input.dim())]
    # Views, so that no hooks of the tensors themselves run.
    needed = {
        place: tensor.view_as(tensor)
        for place, tensor in enumerate((input, weight))
        if tensor is not None and ctx.needs_input_grad[place]
    }
    values = needed.get(0, input).to(compute_dtype(input))
    mean = allreduce(values.sum(dims), op=Sum, process_set=ctx.process_set) / total
    centered = values - mean.view(per_channel)
    var = allreduce(centered.square().sum(dims), op=Sum, process_set=ctx.process_set) / total
    output = centered * (var + ctx.eps).rsqrt().view(per_channel)
    if weight is not None:
        output = output * needed.get(1, weight).view(per_channel)
    grads = {}
    if needed:
        made = torch.autograd.grad(output, list(needed.values()), grad.to(output.dtype), create_graph=True)
        grads = dict(zip(needed, made, strict=True))
    return grads.get(0), grads.get(1), grad.sum(dims) if ctx.needs_input_grad[2] else None
