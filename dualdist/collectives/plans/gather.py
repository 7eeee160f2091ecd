"""The plan of gather."""

from __future__ import annotations

import torch

from ...agreement import call_kinds
from ...agreement.verdict import Verdict
from ...backends.base import Group
from ...world.process_sets import ProcessSet, channel_of
from ..movement import gather_rows
from .arguments import check_root, check_tensor, describe_rows
from .plan import Plan, make_call, planned

__all__ = ("plan_gather",)


@planned(call_kinds.GATHER)
def plan_gather(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, *, process_set: ProcessSet
) -> Plan[tuple[torch.Tensor, torch.Tensor]]:
    """Return the plan of a gather. Its result: the received rows, and their number from each rank, (size,) int32."""
    channel, (root_rank, root) = channel_of(process_set), check_root(root_rank, process_set)
    check_tensor(tensor)
    table = tensor if tensor.dim() else tensor.reshape(1)
    rows_of_rank = table.shape[0]
    call = make_call(call_kinds.GATHER, name, count=rows_of_rank, root_rank=root_rank, **describe_rows(table))

    def execute(group: Group, verdict: Verdict) -> tuple[torch.Tensor, torch.Tensor]:
        rows, counts = gather_rows(group, table, root, verdict.counts)
        return rows, torch.tensor(counts, dtype=torch.int32)

    return Plan(channel, call, execute, [tensor])
