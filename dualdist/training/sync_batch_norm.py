"""Batch normalization over the batches of all ranks, on any backend and device.

One collective in forward, one in backward; training/sync_batch_norm.py runs them. batch_norm_kernels.py computes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from ..agreement import call_kinds
from ..agreement.verdict import Verdict, payload_capacity
from ..backends.base import Group
from ..backends.torch_interface import group_of_mesh, ranks_of, world_group
from ..checks import converted, flag, instance, integer, number, wrong
from ..collectives.allreduce import allreduce
from ..collectives.plan import dtype_name, make_call
from ..collectives.wire import as_bytes, from_bytes
from ..compiling import not_compiled
from ..types import Sum
from ..world.context import current
from ..world.process_sets import (
    ProcessSet,
    channel_of,
    check_process_set,
    global_process_set,
    process_set_of_ranks,
    reporting,
)
from .batch_norm_kernels import Kernels, Statistics, compute_dtype, kernels_for

# Devices that users name.


def checked_device(name: str, device: Any) -> torch.device:
    """Return `device`, the parameter `name`, as a torch.device. Raises TypeError if torch does not know it."""
    return converted(name, device, torch.device, "a device", "Pass hvd.device().", without=bool)


# Collectives of SyncBatchNorm: each rank sends one small row of numbers, in forward and in backward.
#
# On the CPU the row travels with the agreement, in one exchange. On a device a regular step has no agreement for it.

_LONGEST = 1 << 15
"""The longest row in bytes that is sent with the agreement."""

Combine = Callable[[Group, torch.Tensor], torch.Tensor]


def gather_rows(row: torch.Tensor, name: str, process_set: ProcessSet) -> torch.Tensor:
    """Return the `row` ((n,)) of every member, (size, n) on its device. Collective over `process_set`."""
    return _exchanged(row, name, process_set, lambda rows: rows, _gather)


def sum_rows(row: torch.Tensor, name: str, process_set: ProcessSet) -> torch.Tensor:
    """Return the sum of the `row` ((n,)) of every member, on its device. Collective over `process_set`."""
    return _exchanged(row, name, process_set, lambda rows: rows.sum(dim=0), _sum)


def _exchanged(
    row: torch.Tensor,
    name: str,
    process_set: ProcessSet,
    of_payloads: Callable[[torch.Tensor], torch.Tensor],
    of_group: Combine,
) -> torch.Tensor:
    """Run the call. of_payloads: computes the result from all rows; of_group: computes it over the group."""
    channel = channel_of(process_set)
    wire = row.to(channel.group.wire_device(row.device))
    payload = b""
    if wire.device.type == "cpu" and wire.nbytes <= payload_capacity(channel.group.size, _LONGEST):
        payload = wire.numpy().tobytes()
    call = make_call(
        call_kinds.SYNC_BATCH_NORM,
        name,
        payload=payload,
        values=row.numel(),
        dtype=dtype_name(row.dtype),
        device=row.device.type,
    )

    def execute(group: Group, verdict: Verdict) -> torch.Tensor:
        if any(verdict.payloads):
            rows = torch.frombuffer(bytearray(b"".join(verdict.payloads)), dtype=row.dtype)
            return of_payloads(rows.view(group.size, -1))
        return of_group(group, wire)

    run = channel.ahead.run if runs_ahead(wire) else channel.run
    return run(call, execute).to(row.device)


def runs_ahead(wire: torch.Tensor) -> bool:
    """Return whether the host need not wait for a collective of `wire`."""
    return wire.device.type != "cpu"


def _gather(group: Group, wire: torch.Tensor) -> torch.Tensor:
    data = as_bytes(wire, group)
    output = torch.empty(group.size * data.numel(), dtype=torch.uint8, device=data.device)
    group.allgather(output, data).wait()
    return from_bytes(output, (group.size, wire.numel()), wire)


def _sum(group: Group, wire: torch.Tensor) -> torch.Tensor:
    total = wire.clone()
    group.allreduce_(total, Sum).wait()
    return total


# The process set that the argument `process_group` means: in torch's interface it may be a group of torch.


def set_of_group(process_group: Any, *, registered: bool) -> ProcessSet:
    """Return the process set that `process_group` means; None means all ranks.

    Collective over its members if it is a group of torch whose ranks have no process set yet. Raises TypeError, or
    BackendUnavailableError for a group of torch that the backend cannot use.
    """
    if process_group is None:
        return global_process_set
    ranks = ranks_of(process_group)
    if ranks is not None:
        return process_set_of_ranks(ranks)
    rule = "a ProcessSet or a ProcessGroup of torch that this rank belongs to"
    instance("process_group", process_group, ProcessSet, rule, "Make one with add_process_set(ranks).")
    check_process_set(process_group, "process_group", registered=registered)
    return process_group  # type: ignore[no-any-return]


def set_of_group_or_mesh(process_group: Any, device_mesh: Any) -> ProcessSet:
    """Return the process set that one of the two arguments means. Raises ValueError if there are two, or TypeError."""
    if device_mesh is None:
        return set_of_group(process_group, registered=True)
    if process_group is not None:
        raise ValueError(
            "`device_mesh` must be None if `process_group` is passed, but is not. Pass one of them."
        )
    group = group_of_mesh(device_mesh)
    if group is None:
        raise wrong(
            "device_mesh", "a DeviceMesh of one dimension", device_mesh, "Pass one, or mesh['dp'].", TypeError
        )
    return set_of_group(group, registered=True)


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


# Finds layers of torch.nn.SyncBatchNorm that would normalize by the batch of their own rank only.


def check_sync_batch_norms(parts: Iterable[torch.nn.Module]) -> None:
    """Raise ValueError if one of `parts` is a torch.nn.SyncBatchNorm that cannot reach the other ranks.

    Such a layer needs a process group of torch and a GPU: it raises on the CPU, and without a group it silently uses
    its own batch (torch/nn/modules/batchnorm.py, SyncBatchNorm.forward).
    """
    if world_group() is None and current().world.size == 1:
        return
    for part in parts:
        if not isinstance(part, torch.nn.SyncBatchNorm):
            continue
        tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if world_group() is None or any(tensor.device.type == "cpu" for tensor in tensors):
            raise ValueError(
                "The model must not have a torch.nn.SyncBatchNorm here, since that layer works on GPUs over "
                "torch.distributed only, but it does. Call hvd.SyncBatchNorm.convert_sync_batchnorm(model) first."
            )


def layers_with(params: Sequence[torch.Tensor]) -> list[torch.nn.Module]:
    """Return the live layers of torch.nn.SyncBatchNorm that hold one of `params`. An optimizer knows no modules."""
    own = {id(param) for param in params}
    kinds = _with_subclasses(torch.nn.SyncBatchNorm)

    def found() -> list[torch.nn.Module]:
        # Not gc.get_objects(): while its list exists, a tuple that another thread is just making raises SystemError.
        layers = [value for kind in kinds for value in gc.get_referrers(kind) if type(value) is kind]
        return [
            layer for layer in layers if any(id(param) in own for param in layer.parameters(recurse=False))
        ]

    if not found():
        return []
    gc.collect()  # layers that were converted may be garbage
    return found()


def _with_subclasses(kind: type[torch.nn.SyncBatchNorm]) -> set[type[torch.nn.SyncBatchNorm]]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))
