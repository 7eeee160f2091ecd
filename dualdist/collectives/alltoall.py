"""alltoall in all its forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..world.process_sets import ProcessSet, global_process_set
from .autograd import Alltoall, record
from .plans.alltoall import plan_alltoall

__all__ = ("alltoall", "alltoall_async")


def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send rows of `tensor` to every rank and return the rows from all ranks, in rank order; differentiable.

    Collective: every member of `process_set` must call it.

    Args:
        tensor: (n, ...), any dtype.
        splits: the number of rows for each rank, a list or a 1-D int32 tensor; rows beyond their sum are not sent.
            None: the same number for each; n must then be divisible by the number of ranks.
        name: matches the calls of the ranks, in any order. Calls without one match by their order among those of the
            same kind.

    Returns:
        (m, ...), same dtype and device. With `splits` also the number of rows from each rank, (size,) int32.

    Raises:
        ValueError: an argument is wrong on this rank.
        HorovodInternalError: trailing dimensions, dtypes or calls differ, a rank did not call in time, or the backend
            failed.
    """
    plan = plan_alltoall(tensor, splits, name, process_set=process_set)
    rows, counts = record(Alltoall, plan, [tensor], process_set)
    return rows if splits is None else (rows, _on_device_of(splits, counts))


def alltoall_async(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `alltoall` and return a handle; `synchronize` always returns (rows, number of rows from each rank)."""
    plan = plan_alltoall(tensor, splits, name, process_set=process_set)
    return plan.then(lambda result: (result[0], _on_device_of(splits, result[1]))).submit()


def _on_device_of(splits: Any, counts: torch.Tensor) -> torch.Tensor:
    return counts.to(splits.device) if isinstance(splits, torch.Tensor) else counts
