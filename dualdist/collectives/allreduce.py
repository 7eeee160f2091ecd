"""allreduce and grouped_allreduce in all their forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..agreement import call_kinds
from ..agreement.verdict import Verdict
from ..backends.base import Group
from ..compiling import not_compiled
from ..types import Average, Max, Min, Op, Product, Sum
from ..world.process_sets import ProcessSet, channel_of, global_process_set
from .compression import Compression, Compressor, compressed
from .plan import (
    Plan,
    ReductionArguments,
    check_reduction,
    check_tensors,
    describe_reduction,
    make_call,
    planned,
    record,
)
from .reduction import Reduction, payload_of, reduce_payloads, reduce_tensors

# The plan of allreduce and grouped_allreduce.


@planned(call_kinds.ALLREDUCE)
def plan_allreduce(
    tensors: Sequence[torch.Tensor],
    arguments: ReductionArguments,
    name: str | None = None,
    *,
    in_place: bool = False,
    grouped: bool = False,
    process_set: ProcessSet,
) -> Plan[tuple[torch.Tensor, ...]]:
    """Return the plan of an allreduce. Its result: `tensors` themselves, or new tensors of the same shapes."""
    channel, reduction = channel_of(process_set), arguments.reduction(default=Average)
    tensors = check_tensors(tensors, grouped=grouped)
    check_reduction(tensors, reduction, process_set)
    payload = payload_of(channel.group, tensors, reduction)
    kind = call_kinds.GROUPED_ALLREDUCE if grouped else call_kinds.ALLREDUCE
    call = make_call(kind, name, payload=payload, **describe_reduction(tensors, reduction))

    def execute(group: Group, verdict: Verdict) -> tuple[torch.Tensor, ...]:
        outputs = tuple(tensors) if in_place else tuple(tensor.detach().clone() for tensor in tensors)
        if any(verdict.payloads):
            reduce_payloads(group, verdict.payloads, outputs, reduction)
        else:
            reduce_tensors(group, outputs, reduction)
        return outputs

    return Plan(channel, call, execute, tensors)


Tensors = tuple[torch.Tensor, ...]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return `tensor` reduced over the ranks; differentiable.

    Collective: every member of `process_set` must call it.

    Args:
        tensor: any shape, equal on all ranks; floating-point, integer, bool (Sum, Min, Max, Product) or complex
            (Sum, Average); on the CPU of all ranks or on a GPU of all ranks; any memory layout.
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
        HorovodInternalError: the ranks' calls differ, a rank did not call in time, or the backend failed.
    """
    sent, (ctx,) = compressed([tensor], compression, call_kinds.ALLREDUCE, process_set)
    arguments = ReductionArguments(op, prescale_factor, postscale_factor, average)
    plan = plan_allreduce(sent, arguments, name, process_set=process_set)
    (reduced,) = record(Allreduce, plan, sent, process_set)
    return compression.decompress(reduced, ctx)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `allreduce` and return a handle; `synchronize` returns the new tensor. Not differentiable.

    `tensor` must not change until then. Otherwise as `allreduce`.
    """
    arguments = ReductionArguments(op, prescale_factor, postscale_factor, average)
    plan = plan_allreduce([tensor], arguments, name, process_set=process_set)
    return plan.then(_only).submit()


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce `tensor` in place over the ranks and return it. Not differentiable. Otherwise as `allreduce`."""
    arguments = ReductionArguments(op, prescale_factor, postscale_factor, average)
    return _only(plan_allreduce([tensor], arguments, name, in_place=True, process_set=process_set).run())


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `allreduce_` and return a handle; `synchronize` returns `tensor` itself."""
    arguments = ReductionArguments(op, prescale_factor, postscale_factor, average)
    plan = plan_allreduce([tensor], arguments, name, in_place=True, process_set=process_set)
    return plan.then(_only).submit()


def _only(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    (output,) = outputs
    return output


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return `tensors` reduced over the ranks, as one operation; differentiable.

    The tensors may differ in shape and dtype but not in device. Otherwise as `allreduce`.
    """
    sent, contexts = compressed(tensors, compression, call_kinds.GROUPED_ALLREDUCE, process_set, grouped=True)
    arguments = ReductionArguments(op, prescale_factor, postscale_factor, average)
    plan = plan_allreduce(sent, arguments, name, grouped=True, process_set=process_set)
    reduced = record(Allreduce, plan, sent, process_set)
    return [compression.decompress(output, ctx) for output, ctx in zip(reduced, contexts, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allreduce` and return a handle; `synchronize` returns the tuple of new tensors."""
    arguments = ReductionArguments(op, prescale_factor, postscale_factor, average)
    return plan_allreduce(tensors, arguments, name, grouped=True, process_set=process_set).submit()


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduce `tensors` in place, as one operation, and return them as a tuple (as Horovod does)."""
    arguments = ReductionArguments(op, prescale_factor, postscale_factor, average)
    plan = plan_allreduce(tensors, arguments, name, in_place=True, grouped=True, process_set=process_set)
    return plan.run()


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allreduce_` and return a handle; `synchronize` returns the tuple of `tensors`."""
    arguments = ReductionArguments(op, prescale_factor, postscale_factor, average)
    plan = plan_allreduce(tensors, arguments, name, in_place=True, grouped=True, process_set=process_set)
    return plan.submit()


@not_compiled
class Allreduce(torch.autograd.Function):
    """The gradient of allreduce and grouped_allreduce.

    Sum, Average and Adasum: the same reduction of the gradients (horovod/torch/mpi_ops.py:194). Min and Max: the sum
    of the gradients, on the ranks that have the extreme value; several such ranks share it equally. Product: the sum of
    the gradients, times the product of the other ranks' values.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan[Tensors], process_set: ProcessSet, *tensors: torch.Tensor) -> Tensors:
        outputs = plan.run()
        ctx.reduction, ctx.process_set = Reduction.of(plan.call), process_set
        if ctx.reduction.op in (Min, Max, Product):
            ctx.save_for_backward(*tensors)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        reduction, process_set = ctx.reduction, ctx.process_set
        if reduction.op not in (Min, Max, Product):
            arguments = ReductionArguments(
                reduction.op, reduction.prescale_factor, reduction.postscale_factor
            )
            plan = plan_allreduce(grads, arguments, grouped=len(grads) > 1, process_set=process_set)
            return None, None, *record(Allreduce, plan, grads, process_set)
        factor = reduction.prescale_factor * reduction.postscale_factor
        arguments = ReductionArguments(Sum, postscale_factor=factor)
        plan = plan_allreduce(grads, arguments, grouped=len(grads) > 1, process_set=process_set)
        totals = plan.run()
        share = _product_of_others if reduction.op == Product else _share_of_extreme
        shares = [
            share(tensor.detach() * reduction.prescale_factor, reduction.op, process_set)
            for tensor in ctx.saved_tensors
        ]
        return None, None, *(total * part for total, part in zip(totals, shares, strict=True))


def _share_of_extreme(tensor: torch.Tensor, op: int, process_set: ProcessSet) -> torch.Tensor:
    (extreme,) = plan_allreduce([tensor], ReductionArguments(op), process_set=process_set).run()
    mine = (tensor == extreme).to(tensor.dtype)
    (holders,) = plan_allreduce([mine], ReductionArguments(Sum), process_set=process_set).run()
    return mine / holders


def _product_of_others(tensor: torch.Tensor, op: int, process_set: ProcessSet) -> torch.Tensor:
    stacked = tensor.new_zeros(channel_of(process_set).group.size, *tensor.shape)
    stacked[process_set.rank()] = tensor
    (everyone,) = plan_allreduce([stacked], ReductionArguments(Sum), process_set=process_set).run()
    others = [row for index, row in enumerate(everyone) if index != process_set.rank()]
    return torch.stack([*others, torch.ones_like(tensor)]).prod(dim=0)
