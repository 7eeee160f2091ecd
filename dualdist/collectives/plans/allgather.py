"""The plan of allgather and grouped_allgather."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...agreement import call_kinds
from ...agreement.verdict import Verdict
from ...backends.base import Group
from ...world.process_sets import ProcessSet, channel_of
from ..movement import allgather_rows
from .arguments import check_tensors, dtype_name
from .plan import Plan, make_call, planned

__all__ = ("plan_allgather",)


@planned(call_kinds.ALLGATHER)
def plan_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    *,
    grouped: bool = False,
    process_set: ProcessSet,
) -> Plan[tuple[torch.Tensor, ...]]:
    """Return the plan of an allgather. Its result: for each of `tensors`, the rows of all ranks."""
    channel = channel_of(process_set)
    tensors = check_tensors(tensors, grouped=grouped)
    tables = [tensor if tensor.dim() else tensor.reshape(1) for tensor in tensors]
    call = make_call(
        call_kinds.GROUPED_ALLGATHER if grouped else call_kinds.ALLGATHER,
        name,
        count=tables[0].shape[0],
        trailing_shapes=tuple(tuple(table.shape[1:]) for table in tables),
        dtypes=tuple(dtype_name(table.dtype) for table in tables),
        device=tables[0].device.type,
    )

    def execute(group: Group, verdict: Verdict) -> tuple[torch.Tensor, ...]:
        return tuple(allgather_rows(group, tables, verdict.counts if len(tables) == 1 else None))

    return Plan(channel, call, execute, tensors)
