"""allreduce and grouped_allreduce in all their forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..agreement.call import Kind, warn_deprecated
from ..agreement.connections import Verdict
from ..backends.base import Group
from ..checks import wrong
from ..compiling import not_compiled
from ..types import Adasum, Average, Max, Min, Op, Product, Sum
from ..world import ProcessSetLike, channel_of, global_process_set
from .join import contribute_neutral
from .plan import Plan, check_tensors, make_call, planned
from .reduction import Compression, Compressor, Reduction, compressed, payload_of, reduce_payloads, reduce_tensors

Tensors = tuple[torch.Tensor, ...]
ALLREDUCE = Kind("allreduce", "ALLREDUCE", stand_in=contribute_neutral)
GROUPED_ALLREDUCE = Kind("grouped_allreduce", "ALLREDUCE", stand_in=contribute_neutral)


@planned(ALLREDUCE)
def plan_allreduce(
    tensors: Sequence[torch.Tensor],
    reduction: Reduction,
    name: str | None = None,
    *,
    average: bool | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    in_place: bool = False,
    grouped: bool = False,
    process_set: ProcessSetLike,
) -> Plan[Tensors]:
    """Return the plan of an allreduce. Its result: `tensors` themselves, or new tensors of the same shapes."""
    channel = channel_of(process_set)
    if average is not None or reduction.op is None:
        reduction = reduction._replace(op=_op_of_average(average, reduction.op))
    reduction = reduction.checked()
    sent, restore = check_tensors(tensors, grouped=grouped), None
    if compression is not Compression.none:
        sent, restore = compressed(sent, compression)
    reduction.check(sent, channel.group.size)
    payload = payload_of(channel.group, sent, reduction)
    kind = GROUPED_ALLREDUCE if grouped else ALLREDUCE
    call = make_call(kind, name, payload=payload, **reduction.describe(sent))

    def execute(group: Group, verdict: Verdict) -> Tensors:
        outputs = tuple(sent) if in_place else tuple([tensor.detach().clone() for tensor in sent])
        if any(verdict.payloads):
            reduce_payloads(group, verdict.payloads, outputs, reduction)
        else:
            reduce_tensors(group, outputs, reduction)
        return outputs

    return Plan(process_set, channel, call, execute, sent, restore, reduction.op in (Min, Max, Product))


def _op_of_average(average: Any, op: Op | None) -> int:
    """Return the op that the deprecated argument `average` means; Average without one.

    Warns as Horovod does (horovod/common/util.py:214). A string is a name in its place, as in
    `allreduce(tensor, "loss")`. Horovod averages then, too.
    """
    if average is None:
        return Average
    if not isinstance(average, bool | str):  # such as an op in its place
        raise wrong("average", "True, False or None", average, "Use `op=` instead.", TypeError)
    if op is not None:
        raise ValueError("`average` must not be given together with `op`. Use `op` alone.")
    warn_deprecated("`average` is deprecated; use `op` instead.")
    return Average if average else Sum


@not_compiled
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> torch.Tensor:
    """Return `tensor` reduced over the ranks; differentiable.

    Collective: every member of `process_set` must call it.

    Args:
        tensor: any shape, equal on all ranks; floating-point, integer, bool (Sum, Min, Max, Product) or complex
            (Sum, Average), but not float8, uint16, uint32 or uint64; on the CPU of all ranks or on a GPU of all ranks;
            any memory layout.
        average: deprecated, use `op`.
        name: matches the calls of the ranks, in any order. Calls without one match by their order among those of the
            same kind.
        compression: `Compression.fp16` or `bf16` to send fewer bytes.
        op: Average (default), Sum, Min, Max, Product or Adasum; or SUM, AVG, MIN, MAX or PRODUCT of
            torch.distributed.ReduceOp.
        prescale_factor, postscale_factor: factors before and after the reduction.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises:
        ValueError: an argument is wrong on this rank (dtype, op, name in use, not a member).
        HorovodInternalError: calls differ (CollectiveMismatchError), a rank is late (StallError), or a backend failed.
    """
    reduction = Reduction(op, prescale_factor, postscale_factor)
    plan = plan_allreduce([tensor], reduction, name, average=average, compression=compression, process_set=process_set)
    return plan.run(allreduce_gradient)[0]


@not_compiled
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> int:
    """Start an `allreduce` and return a handle; `synchronize` returns the new tensor. Not differentiable.

    `tensor` must not change until then.

    Collective like `allreduce`, with the same arguments, shapes and errors.
    """
    reduction = Reduction(op, prescale_factor, postscale_factor)
    plan = plan_allreduce([tensor], reduction, name, average=average, process_set=process_set)
    return plan.submit(lambda outputs: outputs[0])


@not_compiled
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> torch.Tensor:
    """Reduce `tensor` in place over the ranks and return it. Not differentiable.

    Collective like `allreduce`, with the same arguments, shapes and errors.
    """
    reduction = Reduction(op, prescale_factor, postscale_factor)
    plan = plan_allreduce([tensor], reduction, name, average=average, in_place=True, process_set=process_set)
    return plan.run()[0]


@not_compiled
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> int:
    """Start an `allreduce_` and return a handle; `synchronize` returns `tensor` itself. Not differentiable.

    Collective like `allreduce`, with the same arguments, shapes and errors.
    """
    reduction = Reduction(op, prescale_factor, postscale_factor)
    plan = plan_allreduce([tensor], reduction, name, average=average, in_place=True, process_set=process_set)
    return plan.submit(lambda outputs: outputs[0])


@not_compiled
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> list[torch.Tensor]:
    """Return `tensors` reduced over the ranks, as one operation; differentiable.

    Collective like `allreduce`, with the same arguments, shapes and errors. The tensors may differ in shape
    and dtype, but not in device.
    """
    reduction = Reduction(op, prescale_factor, postscale_factor)
    plan = plan_allreduce(
        tensors, reduction, name, average=average, compression=compression, grouped=True, process_set=process_set
    )
    return list(plan.run(allreduce_gradient))


@not_compiled
def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> int:
    """Start a `grouped_allreduce` and return a handle; `synchronize` returns the tuple of new tensors.

    Collective like `allreduce`, with the same arguments, shapes and errors. Not differentiable.
    """
    reduction = Reduction(op, prescale_factor, postscale_factor)
    return plan_allreduce(tensors, reduction, name, average=average, grouped=True, process_set=process_set).submit()


@not_compiled
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduce `tensors` in place, as one operation, and return them as a tuple (as Horovod does).

    Collective like `allreduce`, with the same arguments, shapes and errors. Not differentiable.
    """
    reduction = Reduction(op, prescale_factor, postscale_factor)
    plan = plan_allreduce(
        tensors, reduction, name, average=average, in_place=True, grouped=True, process_set=process_set
    )
    return plan.run()


@not_compiled
def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> int:
    """Start a `grouped_allreduce_` and return a handle; `synchronize` returns the tuple of `tensors`.

    Collective like `allreduce`, with the same arguments, shapes and errors. Not differentiable.
    """
    reduction = Reduction(op, prescale_factor, postscale_factor)
    plan = plan_allreduce(
        tensors, reduction, name, average=average, in_place=True, grouped=True, process_set=process_set
    )
    return plan.submit()


def allreduce_gradient(ran: Any, *grads: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the gradients of allreduce and grouped_allreduce.

    Sum, Average and Adasum: the same reduction of the gradients (horovod/torch/mpi_ops.py:194). Min and Max: the sum
    of the gradients, on the ranks that have the extreme value; several such ranks share it equally. Product: the sum of
    the gradients, times the product of the other ranks' values.
    """
    reduction, process_set, grouped = Reduction.of(ran.call), ran.process_set, len(grads) > 1
    op, prescale, postscale = reduction
    if op in (Average, Sum, Adasum):
        return plan_allreduce(grads, reduction, grouped=grouped, process_set=process_set).run(allreduce_gradient)
    summed = Reduction(Sum, postscale_factor=prescale * postscale)
    totals = plan_allreduce(grads, summed, grouped=grouped, process_set=process_set).run()
    share = {Min: _share_of_extreme, Max: _share_of_extreme, Product: _product_of_others}[op]
    shares = [share(tensor.detach() * prescale, op, process_set) for tensor in ran.saved_tensors]
    return [total * part for total, part in zip(totals, shares, strict=True)]


def _share_of_extreme(tensor: torch.Tensor, op: int, process_set: ProcessSetLike) -> torch.Tensor:
    (extreme,) = plan_allreduce([tensor], Reduction(op), process_set=process_set).run()
    mine = (tensor == extreme).to(tensor.dtype)
    (holders,) = plan_allreduce([mine], Reduction(Sum), process_set=process_set).run()
    return mine / holders


def _product_of_others(tensor: torch.Tensor, op: int, process_set: ProcessSetLike) -> torch.Tensor:
    group = channel_of(process_set).group
    stacked = tensor.new_zeros(group.size, *tensor.shape)
    stacked[group.rank] = tensor
    (everyone,) = plan_allreduce([stacked], Reduction(Sum), process_set=process_set).run()
    others = [row for index, row in enumerate(everyone) if index != group.rank]
    return torch.stack([*others, torch.ones_like(tensor)]).prod(dim=0)
