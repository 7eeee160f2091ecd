"""Batch normalization over the batches of all ranks, on any backend and device.

One collective in forward, one in backward. The ranks exchange count, mean and variance of each channel and combine
them, which avoids the cancellation in sums of squares: Chan, Golub and LeVeque, "Updating formulae and a pairwise
algorithm for computing sample variances", 1979 (Stanford STAN-CS-79-773).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from .core.accelerator import checked_device, has_streams
from .core.agreement.call import Kind
from .core.agreement.connections import Verdict, payload_capacity
from .core.backends.base import Group
from .core.backends.torch_groups import world_group
from .core.checks import flag, instance, integer, number, wrong
from .core.collectives.allreduce import allreduce
from .core.collectives.plan import make_call, refuse_fake_tensor_mode
from .core.collectives.wire import dtype_name
from .core.compiling import not_compiled
from .core.types import Sum
from .core.world import (
    ProcessSet,
    ProcessSetLike,
    channel_of,
    checked_process_set,
    current,
    global_process_set,
    reporting,
)

SYNC_BATCH_NORM = Kind("SyncBatchNorm", "ALLGATHER", in_step=True)

# Each rank sends one small row of numbers, in forward and in backward. On the CPU it travels with the agreement, in one
# exchange. On a device a regular step has no agreement for it.

_LONGEST = 1 << 15
"""The longest row in bytes that is sent with the agreement."""


def _exchanged(row: torch.Tensor, name: str, process_set: ProcessSet, *, sums: bool) -> torch.Tensor:
    """Return the rows ((n,)) of all members, (size, n), or with `sums` their sum. Collective over `process_set`.

    May overwrite `row`.
    """
    channel = channel_of(process_set)
    wire = row.to(channel.group.wire_device(row.device))
    payload = b""
    if wire.is_cpu and wire.nbytes <= payload_capacity(channel.group.size, _LONGEST):
        payload = wire.numpy().tobytes()
    agreed: dict[str, Any] = {"values": row.numel(), "dtype": dtype_name(row.dtype), "device": row.device.type}
    call = make_call(SYNC_BATCH_NORM, name, payload=payload, **agreed)

    def execute(group: Group, verdict: Verdict) -> torch.Tensor:
        if any(verdict.payloads):
            rows = torch.frombuffer(bytearray(b"".join(verdict.payloads)), dtype=row.dtype).view(group.size, -1)
            return rows.sum(dim=0) if sums else rows
        if sums:
            group.allreduce_(wire, Sum).wait()
            return wire
        rows = wire.new_empty(group.size, wire.numel())
        group.allgather(rows.view(-1).view(torch.uint8), wire.view(torch.uint8)).wait()
        return rows

    run = channel.ahead.run if channel.ahead and has_streams(wire) else channel.run
    rows: torch.Tensor = run(call, execute)
    return rows.to(row.device)


# The arithmetic: on a GPU with the kernels of torch.nn.SyncBatchNorm, elsewhere with those of torch's BatchNorm. They
# compute in float32, or in float64 for such inputs. The number of operations on the short rows (about 8 us each in a
# training step) costs time, not the length of the rows.

_NO_VALUES = 1e-30
"""The count of an empty batch on a GPU, whose kernel divides by it. It vanishes beside any other count."""


class _Statistics(NamedTuple):
    """The statistics of each channel over all ranks, on the device of the input. The host reads none of them."""

    mean: torch.Tensor
    """(C,)"""
    invstd: torch.Tensor
    """(C,), 1 / sqrt(biased variance + eps)."""
    unbiased: torch.Tensor
    """(C,), the unbiased variance."""
    var_plus_eps: torch.Tensor | None
    """(C,), of the biased variance; None on a GPU."""
    counts: torch.Tensor
    """(n,), which add up to the number of values that each channel has over all ranks. int32 on a GPU."""


def _compute_dtype(input: torch.Tensor) -> torch.dtype:
    return torch.float64 if input.dtype is torch.float64 else torch.float32


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as the kernels that add up read it. Those of the CPU would add up in bfloat16 and float16."""
    return tensor.to(_compute_dtype(tensor)) if tensor.is_cpu else tensor


def _per_channel(values: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Return `values` ((C,)) in a shape that is broadcast over `input`, (N, C, ...)."""
    return values.view(-1, *[1] * (input.dim() - 2))


def _layout(tensor: torch.Tensor) -> torch.memory_format:
    """Return the layout in which the kernels of a GPU read `tensor`."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = layouts.get(tensor.dim(), torch.contiguous_format)
    return layout if tensor.is_contiguous(memory_format=layout) else torch.contiguous_format


@torch.no_grad()
def _statistics(input: torch.Tensor, eps: float, process_set: ProcessSet) -> _Statistics | None:
    """Return the statistics of the batches of all ranks, None if all are empty. Collective over `process_set`.

    input: on a GPU in its `_layout`.
    """
    channels, dtype = input.shape[1], _compute_dtype(input)
    own = torch.full((1,), input.numel() // channels, dtype=dtype, device=input.device)
    if not input.numel():
        found = own.new_ones(2, channels).unbind()
        if input.is_cuda:
            own += _NO_VALUES
    elif input.is_cuda:
        found = torch.batch_norm_stats(input, eps)
    else:
        # Faster than var_mean by a factor of 5 on the CPU.
        found = torch.batch_norm_update_stats(_readable(input), None, None, 0.0)
    rows = _exchanged(torch.cat([*found, own]), "statistics", process_set, sums=False)
    means, spreads, counts = rows.split([channels, channels, 1], dim=1)
    if input.numel() // channels < 2 and (count := int(counts.sum())) < 2:
        if count == 0:
            return None
        raise ValueError(
            f"`input` must have at least two values per channel over all ranks in training, but has "
            f"{count} instead. Use larger batches, or leave the last one out with DataLoader(drop_last=True)."
        )
    if input.is_cuda:
        # The kernel takes the dtype of the first for that of all.
        same_mean, unbiased = own.new_zeros(2, channels)
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            input, means, spreads, same_mean, unbiased, 1.0, eps, counts.view(-1)
        )
        return _Statistics(mean, invstd, unbiased, None, counts.view(-1).to(torch.int32))
    count = counts.sum(dim=0)
    shares = counts / count
    mean = (shares * means).sum(dim=0)
    biased = (shares * (spreads + (means - mean).square())).sum(dim=0)
    var_plus_eps = biased + eps
    return _Statistics(mean, var_plus_eps.rsqrt(), biased * (count / (count - 1)), var_plus_eps, count)


def _scaled(
    input: torch.Tensor, found: _Statistics, scale: torch.Tensor | None, shift: torch.Tensor | None
) -> torch.Tensor:
    """Return (input - mean) * invstd * scale + shift."""
    if found.var_plus_eps is None:
        if not input.numel():
            return torch.empty_like(input)
        return torch.batch_norm_elemt(input, scale, shift, found.mean, found.invstd, 0.0)
    # torch.nn.functional.batch_norm of some releases refuses an eps of 0.
    return torch.batch_norm(input, scale, shift, found.mean, found.var_plus_eps, False, 0.0, 0.0, False)


class _Normalize(torch.autograd.Function):
    """Normalization by statistics that depend on this rank's input."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        found: _Statistics,
        eps: float,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight, *found)
        ctx.eps, ctx.process_set = eps, process_set
        scale, shift = (None if param is None else param.to(found.mean.dtype) for param in (weight, bias))
        return _scaled(input, found, scale, shift)

    @staticmethod
    @not_compiled
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        input, weight, *tensors = ctx.saved_tensors
        found = _Statistics(*tensors)
        if torch.is_grad_enabled():  # create_graph=True
            return *_differentiable_grads(ctx, grad, input, weight, found.counts.sum()), None, None, None
        scale = None if weight is None else weight.to(found.mean.dtype)
        if input.is_cuda:
            grad = grad.contiguous(memory_format=_layout(input))
            # With channels last, one must be there.
            scale = torch.ones_like(found.mean) if scale is None else scale
        own, grad_weight, grad_bias = _sums(grad, input, found, scale)
        grad_input = None
        if ctx.needs_input_grad[0]:
            total = _exchanged(own, "gradients", ctx.process_set, sums=True)
            grad_input = _input_grad(grad, input, scale, found, total)
        needed = zip((grad_weight, grad_bias), ctx.needs_input_grad[1:3], strict=True)
        return grad_input, *(grad if is_needed else None for grad, is_needed in needed), None, None, None


def _sums(
    grad: torch.Tensor, input: torch.Tensor, found: _Statistics, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what the ranks add up for `_input_grad`, (2C,), and the own gradients of weight and bias, (C,) each."""
    if not input.numel():
        zeros = torch.zeros_like(found.mean)
        return torch.cat([zeros, zeros]), zeros, zeros
    if input.is_cuda:
        sum_dy, sum_dy_xmu, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
            grad, input, found.mean, found.invstd, scale, True, True, True
        )
        return torch.cat([sum_dy, sum_dy_xmu]), grad_weight, grad_bias
    # invstd in place of the weight, which does not matter: some devices want the dtype of the sums.
    saved = found.invstd, None, None, found.mean, found.invstd
    _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
        _readable(grad), _readable(input), *saved, True, 0.0, [False, True, True]
    )
    return torch.cat([grad_bias, grad_weight]), grad_weight, grad_bias


def _input_grad(
    grad: torch.Tensor, input: torch.Tensor, scale: torch.Tensor | None, found: _Statistics, total: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of `input`. total: the `_sums` of all ranks."""
    sums = total.view(2, -1)
    if input.is_cuda:
        if not input.numel():
            return torch.empty_like(input)
        return torch.batch_norm_backward_elemt(
            grad, input, found.mean, found.invstd, scale, sums[0], sums[1], found.counts
        )
    dtype = found.mean.dtype
    factor = found.invstd if scale is None else found.invstd * scale
    # (grad - grad_mean - (input - mean) * invstd * slope) * factor
    shift, slope = (-sums / found.counts * factor).unbind()
    made = _scaled(input.to(dtype), found, slope, shift)
    return made.addcmul_(grad.to(dtype), _per_channel(factor, input)).to(input.dtype)


def _differentiable_grads(
    ctx: Any, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, count: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of input, weight and bias by operations that autograd records. Collective.

    count: values per channel over all ranks.
    """
    dims = [dim for dim in range(input.dim()) if dim != 1]
    # Views, so that no hooks of the tensors themselves run.
    needed = {
        place: tensor.view_as(tensor)
        for place, tensor in enumerate((input, weight))
        if tensor is not None and ctx.needs_input_grad[place]
    }
    values = needed.get(0, input).to(_compute_dtype(input))
    mean = allreduce(values.sum(dims), op=Sum, process_set=ctx.process_set) / count
    centered = values - _per_channel(mean, input)
    var = allreduce(centered.square().sum(dims), op=Sum, process_set=ctx.process_set) / count
    output = centered * _per_channel((var + ctx.eps).rsqrt(), input)
    if weight is not None:
        output = output * _per_channel(needed.get(1, weight), input)
    grads = {}
    if needed:
        made = torch.autograd.grad(output, list(needed.values()), grad.to(output.dtype), create_graph=True)
        grads = dict(zip(needed, made, strict=True))
    return grads.get(0), grads.get(1), grad.sum(dims) if ctx.needs_input_grad[2] else None


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

    Raises:
        ValueError: in forward, the input has a wrong shape, or all ranks together have one value per channel.
        HorovodInternalError: in forward and backward, as for `allgather`.
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
        process_set: ProcessSetLike = global_process_set,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        process_set = _chosen_set(process_set, process_group)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise wrong("dtype", "a floating-point torch.dtype or None", dtype, "Pass torch.float32.", TypeError)
        super().__init__(
            integer("num_features", num_features, least=1, below=1 << 31),
            number("eps", eps, least=0),
            momentum if momentum is None else number("momentum", momentum, least=0, most=1),
            flag("affine", affine),
            flag("track_running_stats", track_running_stats),
            device=None if device is None else checked_device("device", device),
            dtype=dtype,
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
            return super().forward(input)
        with reporting(SYNC_BATCH_NORM, self.process_set):
            refuse_fake_tensor_mode()
            self._check_input_dim(input)
        if input.is_cuda:
            if channel_of(self.process_set).group.size == 1 and input.numel() > input.shape[1]:
                return super().forward(input)  # on the CPU, torch computes float16 in float16
            input = input.contiguous(memory_format=_layout(input))
        found = _statistics(input, self.eps, self.process_set)
        if found is None:
            return super().forward(input)  # an empty output; the running statistics do not change
        self._track(found)
        output: torch.Tensor = _Normalize.apply(input, self.weight, self.bias, found, self.eps, self.process_set)
        return output

    @torch.no_grad()
    def _track(self, found: _Statistics) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        # On the device, so that the host does not wait for it.
        share: Any = self.momentum
        if share is None:
            share = self.num_batches_tracked.to(found.mean.dtype).reciprocal()
        for running, new in ((self.running_mean, found.mean), (self.running_var, found.unbiased)):
            if running.dtype == new.dtype:
                running.lerp_(new, share)
            else:
                running.copy_(running.to(new.dtype).lerp(new, share))

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSetLike = global_process_set, process_group: Any = None
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

        def synchronized(layer: _BatchNorm) -> SyncBatchNorm:
            made = _like(layer, cls, process_set=process_set)
            made._origin = layer._origin if isinstance(layer, cls) else type(layer)
            return made

        return _replaced(module, _BatchNorm, synchronized)

    @classmethod
    def revert_sync_batchnorm(cls, module: torch.nn.Module) -> torch.nn.Module:
        """Return `module` with every SyncBatchNorm replaced by a layer of its earlier class, with parameters and state.

        The inverse of `convert_sync_batchnorm`, for evaluation or export without dualdist. Local. Raises ValueError for
        a layer that `convert_sync_batchnorm` did not make: its number of dimensions is unknown.
        """
        instance("module", module, torch.nn.Module, "a torch.nn.Module", "Pass the model.")
        return _replaced(module, cls, cls._reverted)

    def _reverted(self) -> _BatchNorm:
        if self._origin is None:
            raise ValueError(
                "`module` must have layers that convert_sync_batchnorm() made, but has a SyncBatchNorm that was "
                "created directly instead. Make a BatchNorm1d, 2d or 3d and load its state_dict()."
            )
        return _like(self, self._origin)


def _chosen_set(process_set: Any, process_group: Any) -> ProcessSet:
    """Return the process set that one of the two arguments means. `process_set` may be a group of torch, too."""
    if process_group is None:
        return checked_process_set(process_set)
    if process_set is not global_process_set:
        raise ValueError("`process_group` must be None if `process_set` is passed, but is not. Pass one of them.")
    return checked_process_set(process_group, "process_group")


def _replaced(
    module: torch.nn.Module, kind: type[_Layer], replacement: Callable[[_Layer], torch.nn.Module]
) -> torch.nn.Module:
    """Return `module` with `replacement(layer)` for each layer of class `kind`: changed, or itself replaced."""
    if isinstance(module, kind):
        return replacement(module)
    for name, child in module.named_children():
        setattr(module, name, _replaced(child, kind, replacement))
    return module


def _like(layer: _BatchNorm, kind: type[_Layer], **others: Any) -> _Layer:
    """Return a layer of class `kind` with the options, parameters, buffers and mode of `layer`."""
    options = layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats
    made = kind(*options, device="meta", **others)
    made.weight, made.bias = layer.weight, layer.bias
    for name, buffer in layer.named_buffers(recurse=False):
        setattr(made, name, buffer)
    return made.train(layer.training)


# Finds layers of torch.nn.SyncBatchNorm that would normalize by the batch of their own rank only.


def check_layers(layers: Iterable[torch.nn.Module]) -> None:
    """Raise ValueError if one of `layers` is a torch.nn.SyncBatchNorm that cannot reach the other ranks.

    Such a layer needs a process group of torch and a GPU: it raises on the CPU, and without a group it silently uses
    its own batch (torch/nn/modules/batchnorm.py, SyncBatchNorm.forward).
    """
    if world_group() is None and current().world.size == 1:
        return
    for layer in layers:
        if not isinstance(layer, torch.nn.SyncBatchNorm):
            continue
        tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        if world_group() is None or any(tensor.device.type == "cpu" for tensor in tensors):
            raise ValueError(
                "The model must not have a torch.nn.SyncBatchNorm here, since that layer works on GPUs over "
                "torch.distributed only, but it does. Call hvd.SyncBatchNorm.convert_sync_batchnorm(model) first."
            )


def layers_with(params: Sequence[torch.Tensor]) -> Iterator[torch.nn.Module]:
    """Yield the live layers of torch.nn.SyncBatchNorm that hold one of `params`. An optimizer knows no modules."""
    own, kinds = {id(param) for param in params}, _with_subclasses(torch.nn.SyncBatchNorm)

    def found() -> list[torch.nn.Module]:
        # Not gc.get_objects(): while its list exists, a tuple that another thread is just making raises SystemError.
        layers = [value for value in gc.get_referrers(*kinds) if type(value) in kinds]
        return [layer for layer in layers if any(id(param) in own for param in layer.parameters(recurse=False))]

    if found():
        gc.collect()  # layers that were converted may be garbage
        yield from found()


def _with_subclasses(kind: type[torch.nn.Module]) -> set[type[torch.nn.Module]]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))
