"""gather, an allgather whose result only the root gets, and scatter, an alltoall in which only the root sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..agreement.call import Kind
from ..agreement.matching import Verdict
from ..backends.base import Group
from ..compiling import not_compiled
from ..world.process_sets import ProcessSetLike, global_process_set
from .plan import (
    Plan,
    channel_and_root,
    check_rows,
    check_splits,
    check_tensor,
    describe_rows,
    make_call,
    planned,
    root_of,
)
from .wire import alltoall_rows, gather_rows

GATHER = Kind("gather", "GATHER")
SCATTER = Kind("scatter", "SCATTER")


@planned(GATHER)
def plan_gather(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, *, process_set: ProcessSetLike
) -> Plan[tuple[torch.Tensor, list[int]]]:
    """Return the plan of a gather. Its result: the received rows, and their number from each rank."""
    channel, root_rank, root = channel_and_root(process_set, root_rank)
    check_tensor(tensor)
    table = tensor if tensor.dim() else tensor.reshape(1)
    call = make_call(GATHER, name, count=table.shape[0], root_rank=root_rank, **describe_rows(table))

    def execute(group: Group, verdict: Verdict) -> tuple[torch.Tensor, list[int]]:
        return gather_rows(group, table, root, verdict.counts)

    return Plan(process_set, channel, call, execute, [tensor])


@planned(SCATTER)
def plan_scatter(
    tensor: torch.Tensor, root_rank: int, splits: Any, name: str | None = None, *, process_set: ProcessSetLike
) -> Plan[torch.Tensor]:
    """Return the plan of a scatter. Its result: the received rows."""
    channel, root_rank, root = channel_and_root(process_set, root_rank)
    size = channel.group.size
    counts = [0] * size
    if channel.group.rank == root:
        check_rows(tensor)
        counts = check_splits(tensor, splits, size)
    else:
        check_tensor(tensor)
    call = make_call(SCATTER, name, count=sum(counts), root_rank=root_rank, **describe_rows(tensor))

    def execute(group: Group, verdict: Verdict) -> torch.Tensor:
        return alltoall_rows(group, tensor, counts, verdict.counts)[0]

    return Plan(process_set, channel, call, execute, [tensor])


@not_compiled
def gather(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated, on rank `root_rank`, and no rows elsewhere; differentiable.

    Collective: every member of `process_set` must call it.

    Args:
        tensor: (n, ...), where n may differ between ranks and be 0; any dtype.
        root_rank: a global rank, equal on all ranks.
        name: as for `allreduce`.

    Returns:
        (sum of n, ...) on the root, (0, ...) on the other ranks.

    Raises ValueError and HorovodInternalError as `allreduce` does.
    """
    plan = plan_gather(tensor, root_rank, name, process_set=process_set)
    rows, _ = plan.run(Gather)
    return rows


@not_compiled
class Gather(torch.autograd.Function):
    """The gradient of gather: each rank gets its own rows of the root's gradient."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan[tuple[torch.Tensor, list[int]]], tensor: torch.Tensor
    ) -> tuple[torch.Tensor, list[int]]:
        rows, ctx.counts = plan.run()
        ctx.root_rank, ctx.process_set, ctx.shape = root_of(plan), plan.process_set, tensor.shape
        return rows, ctx.counts

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        plan = plan_scatter(grad, ctx.root_rank, ctx.counts, process_set=ctx.process_set)
        return None, plan.run(Scatter).reshape(ctx.shape)


@not_compiled
def scatter(
    tensor: torch.Tensor,
    root_rank: int,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> torch.Tensor:
    """Return this rank's share of the rows of rank `root_rank`'s `tensor`; differentiable.

    Collective: every member of `process_set` must call it.

    Args:
        tensor: (n, ...) on the root, any dtype. On the other ranks any tensor of the same dtype and trailing
            dimensions, such as one without rows.
        root_rank: a global rank, equal on all ranks.
        splits: on the root, the number of rows for each rank, as for `alltoall`. None: the same number for each.
        name: as for `allreduce`.

    Returns:
        (splits[rank], ...), same dtype and device.

    Raises ValueError and HorovodInternalError as `allreduce` does.
    """
    plan = plan_scatter(tensor, root_rank, splits, name, process_set=process_set)
    return plan.run(Scatter)


@not_compiled
class Scatter(torch.autograd.Function):
    """The gradient of scatter: the root gets the gradients of all ranks, the other ranks get zeros."""

    @staticmethod
    def forward(ctx: Any, plan: Plan[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
        ctx.root_rank, ctx.process_set, ctx.shape = root_of(plan), plan.process_set, tensor.shape
        return plan.run()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        plan = plan_gather(grad, ctx.root_rank, process_set=ctx.process_set)
        rows, _ = plan.run(Gather)
        back = grad.new_zeros(ctx.shape)
        back[: len(rows)] = rows
        return None, back
