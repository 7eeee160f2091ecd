"""scatter: an alltoall in which only the root sends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..world.process_sets import ProcessSet, global_process_set
from .autograd import Scatter, record
from .plans.scatter import plan_scatter

__all__ = ("scatter",)


def scatter(
    tensor: torch.Tensor,
    root_rank: int,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return this rank's share of the rows of rank `root_rank`'s `tensor`; differentiable.

    Collective: every member of `process_set` must call it.

    Args:
        tensor: (n, ...) on the root, any dtype. On the other ranks any tensor of the same dtype and trailing
            dimensions, such as one without rows.
        root_rank: a global rank, equal on all ranks.
        splits: on the root, the number of rows for each rank, as for `alltoall`. None: the same number for each.
        name: matches the calls of the ranks, in any order. Calls without one match by their order among those of the
            same kind.

    Returns:
        (splits[rank], ...), same dtype and device.

    Raises:
        ValueError: an argument is wrong on this rank.
        HorovodInternalError: as for `alltoall`.
    """
    plan = plan_scatter(tensor, root_rank, splits, name, process_set=process_set)
    return record(Scatter, plan, [tensor], process_set)
