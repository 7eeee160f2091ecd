"""The plan of reduce."""

from __future__ import annotations

import torch

from ...agreement import call_kinds
from ...agreement.verdict import Verdict
from ...backends.base import Group
from ...world.process_sets import ProcessSet, channel_of
from ..reduction import reduce_tensors
from .arguments import ReductionArguments, check_reduction, check_root, check_tensor, describe_reduction
from .plan import Plan, make_call, planned

__all__ = ("plan_reduce",)


@planned(call_kinds.REDUCE)
def plan_reduce(
    tensor: torch.Tensor,
    root_rank: int,
    arguments: ReductionArguments,
    name: str | None = None,
    *,
    process_set: ProcessSet,
) -> Plan[torch.Tensor]:
    """Return the plan of a reduce. Its result: the reduced tensor on the root, zeros elsewhere."""
    channel, (root_rank, root) = channel_of(process_set), check_root(root_rank, process_set)
    reduction = arguments.reduction()
    check_tensor(tensor)
    check_reduction([tensor], reduction, process_set)
    call = make_call(call_kinds.REDUCE, name, root_rank=root_rank, **describe_reduction([tensor], reduction))

    def execute(group: Group, verdict: Verdict) -> torch.Tensor:
        output = tensor.detach().clone()
        reduce_tensors(group, [output], reduction)
        return output if group.rank == root else torch.zeros_like(output)

    return Plan(channel, call, execute, [tensor])
