"""reduce: an allreduce whose result only the root gets. The arithmetic of all reductions is in reduction.py."""

from __future__ import annotations

import torch

from ..types import Average, Op
from ..world.process_sets import ProcessSet, global_process_set
from .autograd import Reduce, record
from .plans.arguments import ReductionArguments
from .plans.reduce import plan_reduce

__all__ = ("reduce",)


def reduce(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    op: Op = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return `tensor` reduced over the ranks on rank `root_rank`, zeros elsewhere; differentiable (Sum, Average).

    Collective: every member of `process_set` must call it.

    Args:
        tensor: any shape, equal on all ranks; dtypes as for `allreduce`.
        root_rank: a global rank, equal on all ranks. The other arguments are those of `allreduce`.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises:
        ValueError: an argument is wrong on this rank.
        HorovodInternalError: as for `allreduce`.
        NotImplementedError: autograd is active and `op` is neither Sum nor Average.
    """
    arguments = ReductionArguments(op, prescale_factor, postscale_factor)
    plan = plan_reduce(tensor, root_rank, arguments, name, process_set=process_set)
    return record(Reduce, plan, [tensor], process_set)
