"""Collectives with a root that Horovod does not have: gather, scatter, reduce, gather_object and scatter_object.

A gather is an all-to-all in which every rank sends all its rows to the root, a scatter one in which only the root
sends, and a reduce an allreduce whose result only the root keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .core.agreement.call import Kind
from .core.agreement.connections import Verdict
from .core.backends.base import Group
from .core.checks import items
from .core.collectives.alltoall import check_splits, describe_rows
from .core.collectives.broadcast import broadcast_gradient, plan_broadcast
from .core.collectives.objects import NO_BYTES, dump, load
from .core.collectives.plan import Plan, channel_and_root, check_rows, check_tensor, make_call, planned, root_of
from .core.collectives.reduction import Reduction, reduce_tensors, scale_
from .core.collectives.wire import alltoall_rows
from .core.compiling import not_compiled
from .core.types import Average, Op, Sum
from .core.world import ProcessSetLike, channel_of, global_process_set

REDUCE = Kind("reduce", "REDUCE")
GATHER = Kind("gather", "GATHER")
GATHER_OBJECT = Kind("gather_object", "GATHER")
SCATTER = Kind("scatter", "SCATTER")
SCATTER_OBJECT = Kind("scatter_object", "SCATTER")


Rows = tuple[torch.Tensor, list[int]]
"""The rows that a rank has received, and their number from each rank."""


def gather_rows(group: Group, tensor: torch.Tensor, root: int, rows: Sequence[int]) -> Rows:
    """Return the rows of all members on the member `root`, no rows elsewhere. rows: how many each member has."""
    splits, received = [0] * group.size, [0] * group.size
    splits[root] = rows[group.rank]
    return alltoall_rows(group, tensor, splits, rows, rows if group.rank == root else received)


@planned(GATHER)
def plan_gather(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, *, process_set: ProcessSetLike
) -> Plan[Rows]:
    """Return the plan of a gather."""
    channel, root_rank, root = channel_and_root(process_set, root_rank)
    check_tensor(tensor)
    table = tensor if tensor.dim() else tensor.reshape(1)
    call = make_call(GATHER, name, count=table.shape[0], root_rank=root_rank, **describe_rows(table))
    return Plan(
        process_set, channel, call, lambda group, verdict: gather_rows(group, table, root, verdict.counts), [tensor]
    )


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
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSetLike = global_process_set
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
    rows, _ = plan.run(gather_gradient)
    return rows


def gather_gradient(ran: Any, grad: torch.Tensor, _: Any) -> Sequence[torch.Tensor]:
    """Return the gradient of gather: each rank gets its own rows of the root's gradient."""
    plan = plan_scatter(grad, root_of(ran), ran.numbers, process_set=ran.process_set)
    return [plan.run(scatter_gradient).reshape(ran.shapes[0])]


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
    return plan.run(scatter_gradient)


def scatter_gradient(ran: Any, grad: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the gradient of scatter: the root gets the gradients of all ranks, the other ranks get zeros."""
    plan = plan_gather(grad, root_of(ran), process_set=ran.process_set)
    rows, _ = plan.run(gather_gradient)
    back = grad.new_zeros(ran.shapes[0])
    back[: len(rows)] = rows
    return [back]


@planned(REDUCE)
def plan_reduce(
    tensor: torch.Tensor, root_rank: int, reduction: Reduction, name: str | None, *, process_set: ProcessSetLike
) -> Plan[torch.Tensor]:
    """Return the plan of a reduce. Its result: the reduced tensor on the root, zeros elsewhere."""
    channel, root_rank, root = channel_and_root(process_set, root_rank)
    reduction = reduction.checked()
    check_tensor(tensor)
    reduction.check([tensor], channel.group.size)
    call = make_call(REDUCE, name, root_rank=root_rank, **reduction.describe([tensor]))

    def execute(group: Group, verdict: Verdict) -> torch.Tensor:
        output = tensor.detach().clone()
        reduce_tensors(group, [output], reduction)
        return output if group.rank == root else torch.zeros_like(output)

    return Plan(process_set, channel, call, execute, [tensor])


@not_compiled
def reduce(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    op: Op = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> torch.Tensor:
    """Return `tensor` reduced over the ranks on rank `root_rank`, zeros elsewhere; differentiable (Sum, Average).

    Collective: every member of `process_set` must call it.

    Args:
        tensor: any shape, equal on all ranks; dtypes as for `allreduce`.
        root_rank: a global rank, equal on all ranks.
        op: Average (default), where torch.distributed.reduce sums. The other arguments are those of `allreduce`.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises ValueError and HorovodInternalError as `allreduce` does, and NotImplementedError if autograd is active and
    `op` is neither Sum nor Average.
    """
    reduction = Reduction(op, prescale_factor, postscale_factor)
    plan = plan_reduce(tensor, root_rank, reduction, name, process_set=process_set)
    is_recorded = torch.is_grad_enabled() and tensor.requires_grad
    if is_recorded and Reduction.of(plan.call).op not in (Sum, Average):
        raise NotImplementedError("`reduce` is differentiable for Sum and Average. Use allreduce for other ops.")
    return plan.run(reduce_gradient)


def reduce_gradient(ran: Any, grad: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the gradient of reduce for Sum and Average: the root's on every rank, scaled like the values."""
    reduction = Reduction.of(ran.call)
    plan = plan_broadcast(grad, root_of(ran), process_set=ran.process_set)
    back = plan.run(broadcast_gradient, Sum)
    divisor = channel_of(ran.process_set).group.size if reduction.op == Average else 1
    scale_(back, reduction.prescale_factor * reduction.postscale_factor / divisor)
    return [back]


@planned(GATHER_OBJECT)
def _plan_gather_object(obj: Any, root_rank: int, name: str | None, *, process_set: ProcessSetLike) -> Plan[Rows]:
    """Return the plan of a gather_object, which gathers bytes."""
    channel, root_rank, root = channel_and_root(process_set, root_rank)
    data = dump(obj)
    call = make_call(GATHER_OBJECT, name, count=data.numel(), root_rank=root_rank)
    return Plan(process_set, channel, call, lambda group, verdict: gather_rows(group, data, root, verdict.counts))


@not_compiled
def gather_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> list[Any] | None:
    """Return every rank's `obj` in rank order on rank `root_rank`, None elsewhere.

    Collective: every member of `process_set` must call it. Errors as for `broadcast_object`.
    """
    plan = _plan_gather_object(obj, root_rank, name, process_set=process_set)
    received, counts = plan.run()
    ranks = plan.channel.group.ranks
    is_root = ranks[plan.channel.group.rank] == root_of(plan)
    return list(map(load, received.split(counts), ranks)) if is_root else None


@planned(SCATTER_OBJECT)
def _plan_scatter_object(
    objs: Sequence[Any] | None, root_rank: int, name: str | None, *, process_set: ProcessSetLike
) -> Plan[torch.Tensor]:
    """Return the plan of a scatter_object. Its result: the received bytes."""
    channel, root_rank, root = channel_and_root(process_set, root_rank)
    size, is_root = channel.group.size, channel.group.rank == root
    rule = f"a list with one object for each of {size} ranks on the root"
    given = items("objs", objs, rule, "Wrap each rank's object.") if is_root else []
    if is_root and len(given) != size:
        raise ValueError(f"`objs` must be {rule}, but has {len(given)} objects instead.")
    pickled = [dump(obj) for obj in given] or [NO_BYTES] * size
    data, splits = torch.cat(pickled), [each.numel() for each in pickled]
    call = make_call(SCATTER_OBJECT, name, count=data.numel(), root_rank=root_rank)
    return Plan(
        process_set, channel, call, lambda group, verdict: alltoall_rows(group, data, splits, verdict.counts)[0]
    )


@not_compiled
def scatter_object(
    objs: Sequence[Any] | None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> Any:
    """Return a copy of the object for this rank in rank `root_rank`'s list `objs`, which has one object per rank.

    Collective: every member of `process_set` must call it; `objs` is ignored on the other ranks.
    If their number is wrong, the root raises ValueError, the others HorovodInternalError; else as `broadcast_object`.
    """
    plan = _plan_scatter_object(objs, root_rank, name, process_set=process_set)
    return load(plan.run(), root_of(plan))
