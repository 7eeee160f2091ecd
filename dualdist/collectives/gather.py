"""allgather and grouped_allgather in all their forms, and gather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..agreement import kinds
from ..types import Average
from ..world.process_sets import ProcessSet, channel_of, global_process_set
from .move import exchange_rows, gather_rows
from .plan import Plan, check_root, check_tensor, differentiable, make_call, planned

__all__ = ("allgather", "allgather_async", "gather", "grouped_allgather", "grouped_allgather_async")


@planned(kinds.ALLGATHER)
def plan_allgather(
    tensors: Sequence[torch.Tensor], name: str | None, grouped: bool, *, process_set: ProcessSet
) -> Plan[list[torch.Tensor]]:
    """Return the plan of an allgather. Its result: per tensor, all ranks' rows."""
    channel = channel_of(process_set)
    if not tensors:
        raise ValueError("`tensors` must hold at least one tensor, but is empty instead.")
    for tensor in tensors:
        check_tensor(tensor)
    tables = [tensor if tensor.dim() else tensor.reshape(1) for tensor in tensors]
    call = make_call(
        kinds.GROUPED_ALLGATHER if grouped else kinds.ALLGATHER,
        name,
        count=tables[0].shape[0],
        trailing_shapes=tuple(tuple(table.shape[1:]) for table in tables),
        dtypes=tuple(str(table.dtype).removeprefix("torch.") for table in tables),
        device=tables[0].device.type,
    )
    return Plan(
        channel,
        call,
        lambda group, verdict: gather_rows(group, tables, verdict.counts if len(tables) == 1 else None),
    )


class _Allgather(torch.autograd.Function):
    """The gradient: the average over the ranks of the gradients, own rows (mpi_ops.py, HorovodAllgather)."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan[list[torch.Tensor]], process_set: ProcessSet, *tensors: torch.Tensor
    ) -> Any:
        ctx.process_set = process_set
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tuple(plan.run())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        from .allreduce import grouped_allreduce

        rows = torch.tensor([shape[0] if shape else 1 for shape in ctx.shapes])
        table = allgather(rows.unsqueeze(0), process_set=ctx.process_set)
        place = ctx.process_set.rank()
        starts, counts = table[:place].sum(dim=0).tolist(), rows.tolist()
        mean = grouped_allreduce(grads, op=Average, process_set=ctx.process_set)
        own = [
            grad.narrow(0, start, count).reshape(shape)
            for grad, start, count, shape in zip(mean, starts, counts, ctx.shapes, strict=True)
        ]
        return None, None, *own


def _run(
    tensors: Sequence[torch.Tensor], name: str | None, grouped: bool, process_set: ProcessSet
) -> list[torch.Tensor]:
    plan = plan_allgather(tensors, name, grouped, process_set=process_set)
    if not differentiable(tensors):
        return plan.run()
    return list(_Allgather.apply(plan, process_set, *tensors))


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return every rank's `tensor` behind one another along dimension 0, in rank order; differentiable.

    Collective: every member of `process_set` must call it, in the same order.

    Args:
        tensor: (n, ...), where n may differ between ranks and be 0; a number (0-dim) counts as (1,); any dtype.
        name: must be equal on all ranks; shown in errors and on the timeline.

    Returns:
        (sum of n, ...), same dtype and device.

    Raises:
        ValueError: an argument is wrong on this rank.
        HorovodInternalError: trailing dimensions, dtypes or calls differ, a rank never came, or the backend failed.
    """
    return _run([tensor], name, False, process_set)[0]


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an `allgather` and return a handle at once; `synchronize` gives the new tensor. Not differentiable."""
    return (
        plan_allgather([tensor], name, False, process_set=process_set)
        .then(lambda outputs: outputs[0])
        .submit()
    )


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Return `allgather` of each of `tensors`, as one operation and a tuple (as Horovod does); differentiable."""
    return tuple(_run(list(tensors), name, True, process_set))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a `grouped_allgather` and return a handle at once; `synchronize` gives the tuple of tensors."""
    return plan_allgather(list(tensors), name, True, process_set=process_set).then(tuple).submit()


@planned(kinds.GATHER)
def plan_gather(
    tensor: torch.Tensor, root_rank: int, name: str | None, *, process_set: ProcessSet
) -> Plan[tuple[torch.Tensor, list[int]]]:
    """Return the plan of a gather. Its result: the rows that came, and how many from each rank."""
    root, channel = check_root(root_rank, process_set), channel_of(process_set)
    check_tensor(tensor)
    table = tensor if tensor.dim() else tensor.reshape(1)
    call = make_call(
        kinds.GATHER,
        name,
        trailing_shape=tuple(table.shape[1:]),
        dtype=str(table.dtype).removeprefix("torch."),
        root_rank=root_rank,
        device=table.device.type,
    )
    splits = [table.shape[0] if place == root else 0 for place in range(channel.group.size)]
    return Plan(channel, call, lambda group, verdict: exchange_rows(group, table, splits))


class _Gather(torch.autograd.Function):
    """The gradient: the root's gradient, each rank its own rows."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan[tuple[torch.Tensor, list[int]]],
        root_rank: int,
        process_set: ProcessSet,
        tensor: torch.Tensor,
    ) -> torch.Tensor:
        output, ctx.counts = plan.run()
        ctx.root_rank, ctx.process_set, ctx.shape = root_rank, process_set, tensor.shape
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        from .alltoall import scatter

        return (
            None,
            None,
            None,
            scatter(grad, ctx.root_rank, ctx.counts, process_set=ctx.process_set).reshape(ctx.shape),
        )


def gather(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return every rank's `tensor` behind one another on rank `root_rank`, and no rows elsewhere; differentiable.

    Collective: every member of `process_set` must call it, in the same order.

    Args:
        tensor: (n, ...), where n may differ between ranks and be 0; any dtype.
        root_rank: a global rank, equal on all ranks.

    Returns:
        (sum of n, ...) on the root, (0, ...) on the other ranks.

    Raises:
        ValueError: an argument is wrong on this rank.
        HorovodInternalError: as for `allgather`.
    """
    plan = plan_gather(tensor, root_rank, name, process_set=process_set)
    if not differentiable([tensor]):
        return plan.run()[0]
    output: torch.Tensor = _Gather.apply(plan, root_rank, process_set, tensor)
    return output
