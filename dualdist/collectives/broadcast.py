"""broadcast in all its forms."""

from __future__ import annotations

from typing import Any

import torch

from ..agreement import kinds
from ..types import Average
from ..world.process_sets import ProcessSet, channel_of, global_process_set
from .move import broadcast_into
from .plan import Plan, check_root, check_tensor, describe, differentiable, make_call, planned

__all__ = ("broadcast", "broadcast_", "broadcast_async", "broadcast_async_")


@planned(kinds.BROADCAST)
def plan_broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None, in_place: bool, *, process_set: ProcessSet
) -> Plan[torch.Tensor]:
    """Return the plan of a broadcast. Its result: `tensor` itself, or a new tensor."""
    root, channel = check_root(root_rank, process_set), channel_of(process_set)
    check_tensor(tensor)
    call = make_call(kinds.BROADCAST, name, root_rank=root_rank, **describe(tensor))

    def execute(group: Any, verdict: Any) -> torch.Tensor:
        output = tensor if in_place else tensor.detach().clone()
        broadcast_into(group, output, root)
        return output

    return Plan(channel, call, execute)


class _Broadcast(torch.autograd.Function):
    """The gradient: on the root the average of the ranks' gradients, zero elsewhere (mpi_ops.py, HorovodBroadcast)."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan[torch.Tensor], root_rank: int, process_set: ProcessSet, tensor: torch.Tensor
    ) -> torch.Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return plan.run()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        from .allreduce import allreduce

        mean = allreduce(grad, op=Average, process_set=ctx.process_set)
        is_root = (ctx.process_set.ranks or [])[ctx.process_set.rank()] == ctx.root_rank
        return None, None, None, mean if is_root else torch.zeros_like(mean)


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return rank `root_rank`'s `tensor` on every rank; differentiable.

    Collective: every member of `process_set` must call it, in the same order.

    Args:
        tensor: any shape and dtype, equal on all ranks; any memory layout.
        root_rank: a global rank, equal on all ranks.
        name: must be equal on all ranks; shown in errors and on the timeline.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises:
        ValueError: an argument is wrong on this rank (root not a member, name in use).
        HorovodInternalError: the ranks called different things, a rank never came, or the backend failed.
    """
    plan = plan_broadcast(tensor, root_rank, name, False, process_set=process_set)
    if not differentiable([tensor]):
        return plan.run()
    output: torch.Tensor = _Broadcast.apply(plan, root_rank, process_set, tensor)
    return output


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `broadcast` and return a handle at once; `synchronize` gives the new tensor. Not differentiable."""
    return plan_broadcast(tensor, root_rank, name, False, process_set=process_set).submit()


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite `tensor` with rank `root_rank`'s and return it. Not differentiable. Otherwise as `broadcast`."""
    return plan_broadcast(tensor, root_rank, name, True, process_set=process_set).run()


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `broadcast_` and return a handle at once; `synchronize` gives `tensor` itself."""
    return plan_broadcast(tensor, root_rank, name, True, process_set=process_set).submit()
