"""The plan of scatter."""

from __future__ import annotations

from typing import Any

import torch

from ...agreement import call_kinds
from ...agreement.verdict import Verdict
from ...backends.base import Group
from ...world.process_sets import ProcessSet, channel_of
from ..movement import alltoall_rows
from .arguments import check_root, check_rows, check_splits, check_tensor, describe_rows
from .plan import Plan, make_call, planned

__all__ = ("plan_scatter",)


@planned(call_kinds.SCATTER)
def plan_scatter(
    tensor: torch.Tensor, root_rank: int, splits: Any, name: str | None = None, *, process_set: ProcessSet
) -> Plan[torch.Tensor]:
    """Return the plan of a scatter. Its result: the received rows."""
    channel, (root_rank, root) = channel_of(process_set), check_root(root_rank, process_set)
    size = channel.group.size
    counts = [0] * size
    if channel.group.rank == root:
        check_rows(tensor)
        counts = check_splits(tensor, splits, size)
    else:
        check_tensor(tensor)
    call = make_call(
        call_kinds.SCATTER, name, count=sum(counts), root_rank=root_rank, **describe_rows(tensor)
    )

    def execute(group: Group, verdict: Verdict) -> torch.Tensor:
        return alltoall_rows(group, tensor, counts, verdict.counts)[0]

    return Plan(channel, call, execute, [tensor])
