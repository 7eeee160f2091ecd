"""allgather and grouped_allgather in all their forms."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..agreement import call_kinds
from ..types import Average
from ..world.process_sets import ProcessSet, global_process_set, reporting
from .autograd import Allgather, record
from .plans.allgather import plan_allgather
from .plans.arguments import check_tensors

__all__ = ("allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async")


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    gradient: int = Average,
) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated along dimension 0 in rank order; differentiable.

    Collective: every member of `process_set` must call it.

    Args:
        tensor: (n, ...), where n may differ between ranks and be 0; a number (0-dim) counts as (1,); any dtype.
        name: matches the calls of the ranks, in any order. Calls without one match by their order among those of the
            same kind.
        gradient: Average (default), as in Horovod, for the average of the ranks' gradients; Sum for the gradient of the
            sum of all ranks' losses.

    Returns:
        (sum of n, ...), same dtype and device.

    Raises:
        ValueError: an argument is wrong on this rank.
        HorovodInternalError: trailing dimensions, dtypes or calls differ, a rank did not call in time, or the backend
            failed.
    """
    plan = plan_allgather([tensor], name, process_set=process_set)
    (gathered,) = record(Allgather, plan, [tensor], process_set, gradient)
    return gathered


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an `allgather` and return a handle; `synchronize` returns the new tensor. Not differentiable."""
    plan = plan_allgather([tensor], name, process_set=process_set)
    return plan.then(lambda outputs: outputs[0]).submit()


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    gradient: int = Average,
) -> tuple[torch.Tensor, ...]:
    """Return `allgather` of each of `tensors`, as one operation and a tuple (as Horovod does); differentiable."""
    with reporting(call_kinds.GROUPED_ALLGATHER, process_set):
        tensors = check_tensors(tensors, grouped=True)
    plan = plan_allgather(tensors, name, grouped=True, process_set=process_set)
    return record(Allgather, plan, tensors, process_set, gradient)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a `grouped_allgather` and return a handle; `synchronize` returns the tuple of new tensors."""
    return plan_allgather(tensors, name, grouped=True, process_set=process_set).submit()
