"""The plan of reducescatter and grouped_reducescatter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...agreement import call_kinds
from ...agreement.verdict import Verdict
from ...backends.base import Group
from ...errors import HorovodInternalError
from ...types import REDUCE_OP_NAMES, Average, Sum
from ...world.process_sets import ProcessSet, channel_of
from ..movement import rows_per_rank
from ..reduction import Reduction, reduce_tensors
from .arguments import ReductionArguments, check_reduction, check_rows, check_tensors, describe_reduction
from .plan import Plan, make_call, planned

__all__ = ("plan_reducescatter",)


@planned(call_kinds.REDUCESCATTER)
def plan_reducescatter(
    tensors: Sequence[torch.Tensor],
    arguments: ReductionArguments,
    name: str | None = None,
    *,
    grouped: bool = False,
    process_set: ProcessSet,
) -> Plan[tuple[torch.Tensor, ...]]:
    """Return the plan of a reducescatter. Its result: for each of `tensors`, this rank's rows of the reduced tensor."""
    channel, reduction = channel_of(process_set), arguments.reduction()
    tensors = check_tensors(tensors, grouped=grouped)
    check_reduction(tensors, Reduction(Sum), process_set)
    for tensor in tensors:
        check_rows(tensor)
    if reduction.op not in (Sum, Average):
        # The same class of error as in Horovod (horovod/common/operations.cc:1819).
        raise HorovodInternalError(
            f"`op` must be Sum or Average for reducescatter, but is {REDUCE_OP_NAMES[reduction.op]} instead."
        )
    check_reduction(tensors, reduction, process_set)
    kind = call_kinds.GROUPED_REDUCESCATTER if grouped else call_kinds.REDUCESCATTER
    call = make_call(kind, name, **describe_reduction(tensors, reduction))

    def execute(group: Group, verdict: Verdict) -> tuple[torch.Tensor, ...]:
        whole = [tensor.detach().clone() for tensor in tensors]
        reduce_tensors(group, whole, reduction)
        return tuple(
            tensor.split(rows_per_rank(len(tensor), group.size))[group.rank].clone() for tensor in whole
        )

    return Plan(channel, call, execute, tensors)
