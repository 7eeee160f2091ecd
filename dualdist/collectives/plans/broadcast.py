"""The plan of broadcast."""

from __future__ import annotations

import torch

from ...agreement import call_kinds
from ...agreement.verdict import Verdict
from ...backends.base import Group
from ...world.process_sets import ProcessSet, channel_of
from ..movement import broadcast_into
from ..small_broadcast import overwrite, root_payload
from .arguments import check_root, check_tensor, dtype_name
from .plan import Plan, make_call, planned

__all__ = ("plan_broadcast",)


@planned(call_kinds.BROADCAST)
def plan_broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    *,
    in_place: bool = False,
    process_set: ProcessSet,
) -> Plan[torch.Tensor]:
    """Return the plan of a broadcast. Its result: `tensor` itself, or a new tensor."""
    channel, (root_rank, root) = channel_of(process_set), check_root(root_rank, process_set)
    check_tensor(tensor)
    call = make_call(
        call_kinds.BROADCAST,
        name,
        payload=root_payload(channel.group, [tensor], root),
        root_rank=root_rank,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        device=tensor.device.type,
    )

    def execute(group: Group, verdict: Verdict) -> torch.Tensor:
        output = tensor if in_place else tensor.detach().clone()
        if not any(verdict.payloads):
            broadcast_into(group, output, root)
        elif group.rank != root:
            overwrite([output], verdict.payloads[root])
        return output

    return Plan(channel, call, execute, [tensor])
