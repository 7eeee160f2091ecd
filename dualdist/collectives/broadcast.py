"""broadcast in all its forms."""

from __future__ import annotations

import torch

from ..types import Average
from ..world.process_sets import ProcessSet, global_process_set
from .autograd import Broadcast, record
from .plans.broadcast import plan_broadcast

__all__ = ("broadcast", "broadcast_", "broadcast_async", "broadcast_async_")


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    gradient: int = Average,
) -> torch.Tensor:
    """Return rank `root_rank`'s `tensor` on every rank; differentiable.

    Collective: every member of `process_set` must call it.

    Args:
        tensor: any shape and dtype, equal on all ranks; any memory layout.
        root_rank: a global rank, equal on all ranks.
        name: matches the calls of the ranks, in any order. Calls without one match by their order among those of the
            same kind.
        gradient: Average (default), as in Horovod, for the average of the ranks' gradients on the root; Sum for the
            gradient of the sum of all ranks' losses.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises:
        ValueError: an argument is wrong on this rank (root not a member, name in use).
        HorovodInternalError: the ranks' calls differ, a rank did not call in time, or the backend failed.
    """
    plan = plan_broadcast(tensor, root_rank, name, process_set=process_set)
    return record(Broadcast, plan, [tensor], process_set, gradient)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `broadcast` and return a handle; `synchronize` returns the new tensor. Not differentiable."""
    return plan_broadcast(tensor, root_rank, name, process_set=process_set).submit()


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite `tensor` with rank `root_rank`'s and return it. Not differentiable. Otherwise as `broadcast`."""
    return plan_broadcast(tensor, root_rank, name, in_place=True, process_set=process_set).run()


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `broadcast_` and return a handle; `synchronize` returns `tensor` itself."""
    return plan_broadcast(tensor, root_rank, name, in_place=True, process_set=process_set).submit()
