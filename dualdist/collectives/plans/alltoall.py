"""The plan of alltoall."""

from __future__ import annotations

from typing import Any

import torch

from ...agreement import call_kinds
from ...agreement.verdict import Verdict
from ...backends.base import Group
from ...world.process_sets import ProcessSet, channel_of
from ..movement import alltoall_rows
from .arguments import check_rows, check_splits, describe_rows
from .plan import Plan, make_call, planned

__all__ = ("plan_alltoall",)


@planned(call_kinds.ALLTOALL)
def plan_alltoall(
    tensor: torch.Tensor, splits: Any, name: str | None = None, *, process_set: ProcessSet
) -> Plan[tuple[torch.Tensor, torch.Tensor]]:
    """Return the plan of an alltoall. Its result: the received rows, and their number from each rank, (size,) int32."""
    channel = channel_of(process_set)
    check_rows(tensor)
    counts = check_splits(tensor, splits, channel.group.size)
    call = make_call(call_kinds.ALLTOALL, name, count=sum(counts), **describe_rows(tensor))

    def execute(group: Group, verdict: Verdict) -> tuple[torch.Tensor, torch.Tensor]:
        rows, received = alltoall_rows(group, tensor, counts, verdict.counts)
        return rows, torch.tensor(received, dtype=torch.int32)

    return Plan(channel, call, execute, [tensor])
