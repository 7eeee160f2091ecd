"""gather: an allgather whose result only the root gets."""

from __future__ import annotations

import torch

from ..world.process_sets import ProcessSet, global_process_set
from .autograd import Gather, record
from .plans.gather import plan_gather

__all__ = ("gather",)


def gather(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated, on rank `root_rank`, and no rows elsewhere; differentiable.

    Collective: every member of `process_set` must call it.

    Args:
        tensor: (n, ...), where n may differ between ranks and be 0; any dtype.
        root_rank: a global rank, equal on all ranks.
        name: matches the calls of the ranks, in any order. Calls without one match by their order among those of the
            same kind.

    Returns:
        (sum of n, ...) on the root, (0, ...) on the other ranks.

    Raises:
        ValueError: an argument is wrong on this rank.
        HorovodInternalError: as for `allgather`.
    """
    plan = plan_gather(tensor, root_rank, name, process_set=process_set)
    rows, _ = record(Gather, plan, [tensor], process_set)
    return rows
