"""alltoall in all its forms, and scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..agreement import kinds
from ..world.process_sets import ProcessSet, channel_of, global_process_set
from .move import exchange_rows
from .plan import Plan, check_root, check_tensor, differentiable, make_call, planned

__all__ = ("alltoall", "alltoall_async", "scatter")

Exchanged = tuple[torch.Tensor, list[int]]
"""The rows that came, and how many of them from each rank."""


def check_splits(tensor: torch.Tensor, splits: Any, size: int) -> list[int]:
    """Return `splits` as a list. Raises ValueError unless there is one per rank and they fit the rows of `tensor`."""
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(
                f"`tensor` must have rows that divide by {size} ranks, but has {rows} instead. Give `splits`."
            )
        return [rows // size] * size
    if isinstance(splits, torch.Tensor):
        if splits.dtype is not torch.int32 or splits.dim() != 1:
            raise ValueError(
                f"`splits` must be a 1-D int32 tensor, but is {splits.dim()}-D {splits.dtype} instead."
            )
        splits = splits.tolist()
    counts = [int(count) for count in splits]
    if len(counts) != size or min(counts) < 0 or sum(counts) > rows:
        raise ValueError(
            f"`splits` must be {size} numbers of at least 0 with a sum of at most {rows} rows, but is {counts} instead."
        )
    return counts


@planned(kinds.ALLTOALL)
def plan_alltoall(
    tensor: torch.Tensor, splits: Any, name: str | None, *, process_set: ProcessSet
) -> Plan[Exchanged]:
    """Return the plan of an alltoall."""
    channel = channel_of(process_set)
    check_tensor(tensor)
    if tensor.dim() == 0:
        raise ValueError("`tensor` must have at least one dimension, but is a number instead.")
    counts = check_splits(tensor, splits, channel.group.size)
    call = make_call(
        kinds.ALLTOALL,
        name,
        trailing_shape=tuple(tensor.shape[1:]),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=tensor.device.type,
    )
    return Plan(channel, call, lambda group, verdict: exchange_rows(group, tensor, counts))


class _Alltoall(torch.autograd.Function):
    """The gradient goes back where the rows came from (mpi_ops.py, HorovodAlltoall)."""

    @staticmethod
    def forward(ctx: Any, plan: Plan[Exchanged], process_set: ProcessSet, tensor: torch.Tensor) -> Any:
        output, received = plan.run()
        ctx.process_set, ctx.received, ctx.rows = process_set, received, tensor.shape[0]
        counts = torch.tensor(received, dtype=torch.int32)
        ctx.mark_non_differentiable(counts)
        return output, counts

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        back, _ = plan_alltoall(grad, ctx.received, None, process_set=ctx.process_set).run()
        if len(back) < ctx.rows:  # rows beyond the splits were not sent
            back = torch.cat([back, back.new_zeros(ctx.rows - len(back), *back.shape[1:])])
        return None, None, back


def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send rows of `tensor` to every rank and return what they send here, in rank order; differentiable.

    Collective: every member of `process_set` must call it, in the same order.

    Args:
        tensor: (n, ...), any dtype.
        splits: how many rows go to each rank, a list or a 1-D int32 tensor; rows beyond their sum are not sent. None:
            equally many, n being divisible by the number of ranks.
        name: must be equal on all ranks; shown in errors and on the timeline.

    Returns:
        (m, ...), same dtype and device; with `splits` also how many rows came from each rank, (size,) int32.

    Raises:
        ValueError: an argument is wrong on this rank.
        HorovodInternalError: trailing dimensions, dtypes or calls differ, a rank never came, or the backend failed.
    """
    plan = plan_alltoall(tensor, splits, name, process_set=process_set)
    if differentiable([tensor]):
        output, counts = _Alltoall.apply(plan, process_set, tensor)
    else:
        output, received = plan.run()
        counts = torch.tensor(received, dtype=torch.int32)
    return output if splits is None else (output, _beside(counts, splits))


def alltoall_async(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `alltoall` and return a handle at once; `synchronize` gives (tensor, received splits) in any case."""
    plan = plan_alltoall(tensor, splits, name, process_set=process_set)
    return plan.then(
        lambda result: (result[0], _beside(torch.tensor(result[1], dtype=torch.int32), splits))
    ).submit()


def _beside(counts: torch.Tensor, splits: Any) -> torch.Tensor:
    return counts.to(splits.device) if isinstance(splits, torch.Tensor) else counts


@planned(kinds.SCATTER)
def plan_scatter(
    tensor: torch.Tensor, root_rank: int, splits: Any, name: str | None, *, process_set: ProcessSet
) -> Plan[torch.Tensor]:
    """Return the plan of a scatter. Its result: the rows that came."""
    root, channel = check_root(root_rank, process_set), channel_of(process_set)
    check_tensor(tensor)
    size = channel.group.size
    counts = check_splits(tensor, splits, size) if channel.group.rank == root else [0] * size
    call = make_call(
        kinds.SCATTER,
        name,
        trailing_shape=tuple(tensor.shape[1:]),
        dtype=str(tensor.dtype).removeprefix("torch."),
        root_rank=root_rank,
        device=tensor.device.type,
    )
    return Plan(channel, call, lambda group, verdict: exchange_rows(group, tensor, counts)[0])


class _Scatter(torch.autograd.Function):
    """The gradient: every rank's gradient, gathered on the root; zero elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan[torch.Tensor], root_rank: int, process_set: ProcessSet, tensor: torch.Tensor
    ) -> torch.Tensor:
        ctx.root_rank, ctx.process_set, ctx.shape = root_rank, process_set, tensor.shape
        return plan.run()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        from .gather import gather

        rows = gather(grad, ctx.root_rank, process_set=ctx.process_set)
        back = grad.new_zeros(ctx.shape)
        back[: len(rows)] = rows
        return None, None, None, back


def scatter(
    tensor: torch.Tensor,
    root_rank: int,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return this rank's share of the rows of rank `root_rank`'s `tensor`; differentiable.

    Collective: every member of `process_set` must call it, in the same order.

    Args:
        tensor: (n, ...) on the root, any dtype; elsewhere any tensor of the same dtype and trailing dimensions, such
            as one without rows.
        root_rank: a global rank, equal on all ranks.
        splits: on the root, how many rows go to each rank, as for `alltoall`; None: equally many.

    Returns:
        (splits[rank], ...), same dtype and device.

    Raises:
        ValueError: an argument is wrong on this rank.
        HorovodInternalError: as for `alltoall`.
    """
    plan = plan_scatter(tensor, root_rank, splits, name, process_set=process_set)
    if not differentiable([tensor]):
        return plan.run()
    output: torch.Tensor = _Scatter.apply(plan, root_rank, process_set, tensor)
    return output
