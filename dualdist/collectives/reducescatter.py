"""reducescatter and grouped_reducescatter in all their forms, and reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..agreement import kinds
from ..backends.base import Group
from ..errors import HorovodInternalError
from ..types import REDUCE_OP_NAMES, Average, Sum
from ..world.process_sets import ProcessSet, channel_of, global_process_set
from .allreduce import check_reduction, reduction_arguments
from .broadcast import broadcast
from .compression import Compression, Compressor
from .gather import allgather
from .move import split_rows
from .plan import Plan, check_root, differentiable, make_call, planned
from .reduce import Reduction, reduce_tensors, scale_

__all__ = (
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reduce",
    "reducescatter",
    "reducescatter_async",
)


@planned(kinds.REDUCESCATTER)
def plan_reducescatter(
    tensors: Sequence[torch.Tensor],
    reduction: Reduction,
    name: str | None,
    grouped: bool,
    *,
    process_set: ProcessSet,
) -> Plan[list[torch.Tensor]]:
    """Return the plan of a reducescatter. Its result: per tensor, this rank's rows of the reduced tensor."""
    channel = channel_of(process_set)
    if not tensors:
        raise ValueError("`tensors` must hold at least one tensor, but is empty instead.")
    check_reduction(tensors, Reduction(Sum), process_set)
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("`tensor` must have at least one dimension, but is a number instead.")
    if reduction.op not in (Sum, Average):
        name_of = dict(enumerate(REDUCE_OP_NAMES)).get(reduction.op, reduction.op)
        raise HorovodInternalError(
            f"`op` must be Sum or Average for reducescatter, but is {name_of} instead."
        )
    check_reduction(tensors, reduction, process_set)
    kind = kinds.GROUPED_REDUCESCATTER if grouped else kinds.REDUCESCATTER
    call = make_call(kind, name, **reduction_arguments(tensors, reduction))
    return Plan(channel, call, lambda group, verdict: _own_rows(group, tensors, reduction))


def _own_rows(group: Group, tensors: Sequence[torch.Tensor], reduction: Reduction) -> list[torch.Tensor]:
    whole = [tensor.detach().clone() for tensor in tensors]
    reduce_tensors(group, whole, reduction)
    return [tensor.split(split_rows(len(tensor), group.size))[group.rank].clone() for tensor in whole]


class _Reducescatter(torch.autograd.Function):
    """The gradient: the ranks' gradients gathered, times the size for Sum (mpi_ops.py, HorovodReducescatter)."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan[list[torch.Tensor]], process_set: ProcessSet, *tensors: torch.Tensor
    ) -> Any:
        ctx.reduction, ctx.process_set = Reduction.of(plan.call), process_set
        return tuple(plan.run())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        reduction = ctx.reduction
        factor = reduction.prescale_factor * reduction.postscale_factor
        if reduction.op == Sum:
            factor *= ctx.process_set.size()
        gathered = [allgather(grad, process_set=ctx.process_set) for grad in grads]
        for grad in gathered:
            scale_(grad, factor)
        return None, None, *gathered


def _run(
    tensors: Sequence[torch.Tensor],
    reduction: Reduction,
    name: str | None,
    grouped: bool,
    process_set: ProcessSet,
) -> list[torch.Tensor]:
    plan = plan_reducescatter(tensors, reduction, name, grouped, process_set=process_set)
    if not differentiable(tensors):
        return plan.run()
    return list(_Reducescatter.apply(plan, process_set, *tensors))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce `tensor` over the ranks and return this rank's share of its rows; differentiable.

    Collective: every member of `process_set` must call it, in the same order.

    Args:
        tensor: (n, ...), equal shape on all ranks; dtypes as for `allreduce`.
        op: Average (default) or Sum. The other arguments are those of `allreduce`, in Horovod's order.

    Returns:
        (n // size, ...), with one row more on the first n % size ranks.

    Raises:
        ValueError: an argument is wrong on this rank.
        HorovodInternalError: `op` is another one, the calls differ, a rank never came, or the backend failed.
    """
    compressed, ctx = compression.compress(tensor)
    reduction = Reduction(op, prescale_factor, postscale_factor)
    return compression.decompress(_run([compressed], reduction, name, False, process_set)[0], ctx)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `reducescatter` and return a handle at once; `synchronize` gives the new tensor. Not differentiable."""
    plan = plan_reducescatter(
        [tensor], Reduction(op, prescale_factor, postscale_factor), name, False, process_set=process_set
    )
    return plan.then(lambda outputs: outputs[0]).submit()


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return `reducescatter` of each of `tensors`, as one operation; differentiable."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduction = Reduction(op, prescale_factor, postscale_factor)
    outputs = _run([sent for sent, _ in pairs], reduction, name, True, process_set)
    return [compression.decompress(output, ctx) for output, (_, ctx) in zip(outputs, pairs, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `grouped_reducescatter` and return a handle at once; `synchronize` gives the tuple of new tensors."""
    reduction = Reduction(op, prescale_factor, postscale_factor)
    return (
        plan_reducescatter(list(tensors), reduction, name, True, process_set=process_set).then(tuple).submit()
    )


@planned(kinds.REDUCE)
def plan_reduce(
    tensor: torch.Tensor, root_rank: int, reduction: Reduction, name: str | None, *, process_set: ProcessSet
) -> Plan[torch.Tensor]:
    """Return the plan of a reduce. Its result: the reduced tensor on the root, zeros elsewhere."""
    root, channel = check_root(root_rank, process_set), channel_of(process_set)
    check_reduction([tensor], reduction, process_set)
    call = make_call(kinds.REDUCE, name, root_rank=root_rank, **reduction_arguments([tensor], reduction))

    def execute(group: Group, verdict: Any) -> torch.Tensor:
        output = tensor.detach().clone()
        reduce_tensors(group, [output], reduction)
        return output if group.rank == root else torch.zeros_like(output)

    return Plan(channel, call, execute)


class _Reduce(torch.autograd.Function):
    """The gradient: the root's gradient on every rank, scaled as the values were. For Sum and Average."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan[torch.Tensor], root_rank: int, process_set: ProcessSet, tensor: torch.Tensor
    ) -> torch.Tensor:
        ctx.reduction, ctx.root_rank, ctx.process_set = Reduction.of(plan.call), root_rank, process_set
        if ctx.reduction.op not in (Sum, Average):
            raise NotImplementedError(
                "`reduce` is differentiable for Sum and Average; use allreduce for other ops."
            )
        return plan.run()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        reduction = ctx.reduction
        divisor = ctx.process_set.size() if reduction.op == Average else 1
        back = broadcast(grad, ctx.root_rank, process_set=ctx.process_set)
        scale_(back, reduction.prescale_factor * reduction.postscale_factor / divisor)
        return None, None, None, back


def reduce(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    op: int = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return `tensor` reduced over the ranks on rank `root_rank`, zeros elsewhere; differentiable (Sum, Average).

    Collective: every member of `process_set` must call it, in the same order.

    Args:
        tensor: any shape, equal on all ranks; dtypes as for `allreduce`.
        root_rank: a global rank, equal on all ranks. The other arguments are those of `allreduce`.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises:
        ValueError: an argument is wrong on this rank.
        HorovodInternalError: as for `allreduce`.
    """
    reduction = Reduction(op, prescale_factor, postscale_factor)
    plan = plan_reduce(tensor, root_rank, reduction, name, process_set=process_set)
    if not differentiable([tensor]):
        return plan.run()
    output: torch.Tensor = _Reduce.apply(plan, root_rank, process_set, tensor)
    return output
