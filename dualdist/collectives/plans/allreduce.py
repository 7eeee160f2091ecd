"""The plan of allreduce and grouped_allreduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...agreement import call_kinds
from ...agreement.verdict import Verdict
from ...backends.base import Group
from ...types import Average
from ...world.process_sets import ProcessSet, channel_of
from ..reduction import payload_of, reduce_payloads, reduce_tensors
from .arguments import ReductionArguments, check_reduction, check_tensors, describe_reduction
from .plan import Plan, make_call, planned

__all__ = ("plan_allreduce",)


@planned(call_kinds.ALLREDUCE)
def plan_allreduce(
    tensors: Sequence[torch.Tensor],
    arguments: ReductionArguments,
    name: str | None = None,
    *,
    in_place: bool = False,
    grouped: bool = False,
    process_set: ProcessSet,
) -> Plan[tuple[torch.Tensor, ...]]:
    """Return the plan of an allreduce. Its result: `tensors` themselves, or new tensors of the same shapes."""
    channel, reduction = channel_of(process_set), arguments.reduction(default=Average)
    tensors = check_tensors(tensors, grouped=grouped)
    check_reduction(tensors, reduction, process_set)
    payload = payload_of(channel.group, tensors, reduction)
    kind = call_kinds.GROUPED_ALLREDUCE if grouped else call_kinds.ALLREDUCE
    call = make_call(kind, name, payload=payload, **describe_reduction(tensors, reduction))

    def execute(group: Group, verdict: Verdict) -> tuple[torch.Tensor, ...]:
        outputs = tuple(tensors) if in_place else tuple(tensor.detach().clone() for tensor in tensors)
        if any(verdict.payloads):
            reduce_payloads(group, verdict.payloads, outputs, reduction)
        else:
            reduce_tensors(group, outputs, reduction)
        return outputs

    return Plan(channel, call, execute, tensors)
