"""The plan of allreduce and grouped_allreduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...agreement import kinds
from ...agreement.call_site import warn_deprecated
from ...agreement.verdict import Verdict
from ...backends.base import Group
from ...types import Average, Sum
from ...world.process_sets import ProcessSet, channel_of
from ..reduction import Reduction, payload_of, reduce_payloads, reduce_tensors
from .arguments import check_not_empty, check_reduction, describe_reduction
from .plan import Plan, make_call, planned

__all__ = ("ReductionArguments", "plan_allreduce")


class ReductionArguments(NamedTuple):
    """The arguments of allreduce that choose the reduction, as the user gave them."""

    op: int | None = None
    average: bool | None = None
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0

    def reduction(self) -> Reduction:
        """Return the Reduction.

        Raises ValueError and warns as Horovod does (horovod/common/util.py:214).
        """
        op = self.op
        if op is not None and self.average is not None:
            raise ValueError("`average` must not be given together with `op`. Use `op` alone.")
        if self.average is not None:
            warn_deprecated("`average` is deprecated; use `op` instead.")
            op = Average if self.average else Sum
        return Reduction(
            Average if op is None else op, float(self.prescale_factor), float(self.postscale_factor)
        )


@planned(kinds.ALLREDUCE)
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
    channel, reduction = channel_of(process_set), arguments.reduction()
    check_not_empty(tensors)
    check_reduction(tensors, reduction, process_set)
    payload = payload_of(channel.group, tensors, reduction)
    kind = kinds.GROUPED_ALLREDUCE if grouped else kinds.ALLREDUCE
    call = make_call(kind, name, payload=payload, **describe_reduction(tensors, reduction))

    def execute(group: Group, verdict: Verdict) -> tuple[torch.Tensor, ...]:
        outputs = tuple(tensors) if in_place else tuple(tensor.detach().clone() for tensor in tensors)
        if any(verdict.payloads):
            reduce_payloads(group, verdict.payloads, outputs, reduction)
        else:
            reduce_tensors(group, outputs, reduction)
        return outputs

    return Plan(channel, call, execute)
