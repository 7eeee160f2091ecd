"""Collectives of SyncBatchNorm: each rank sends one small row of numbers, in forward and in backward.

On the CPU the row travels with the agreement, in one exchange. On a device a regular step has no agreement for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..agreement import call_kinds
from ..agreement.verdict import Verdict, payload_capacity
from ..backends.base import Group
from ..types import Sum
from ..world.process_sets import ProcessSet, channel_of
from .plans.arguments import dtype_name
from .plans.plan import make_call
from .wire import as_bytes, from_bytes

__all__ = ("gather_rows", "sum_rows")

_LONGEST = 1 << 15
"""The longest row in bytes that is sent with the agreement."""

Combine = Callable[[Group, torch.Tensor], torch.Tensor]


def gather_rows(row: torch.Tensor, name: str, process_set: ProcessSet) -> torch.Tensor:
    """Return the `row` ((n,)) of every member, (size, n) on its device. Collective over `process_set`."""
    return _exchanged(row, name, process_set, lambda rows: rows, _gather)


def sum_rows(row: torch.Tensor, name: str, process_set: ProcessSet) -> torch.Tensor:
    """Return the sum of the `row` ((n,)) of every member, on its device. Collective over `process_set`."""
    return _exchanged(row, name, process_set, lambda rows: rows.sum(dim=0), _sum)


def _exchanged(
    row: torch.Tensor,
    name: str,
    process_set: ProcessSet,
    of_payloads: Callable[[torch.Tensor], torch.Tensor],
    of_group: Combine,
) -> torch.Tensor:
    """Run the call. of_payloads: computes the result from all rows; of_group: computes it over the group."""
    channel = channel_of(process_set)
    wire = row.to(channel.group.wire_device(row.device))
    payload = b""
    if wire.device.type == "cpu" and wire.nbytes <= payload_capacity(channel.group.size, _LONGEST):
        payload = wire.numpy().tobytes()
    call = make_call(
        call_kinds.SYNC_BATCH_NORM,
        name,
        payload=payload,
        values=row.numel(),
        dtype=dtype_name(row.dtype),
        device=row.device.type,
    )

    def execute(group: Group, verdict: Verdict) -> torch.Tensor:
        if any(verdict.payloads):
            rows = torch.frombuffer(bytearray(b"".join(verdict.payloads)), dtype=row.dtype)
            return of_payloads(rows.view(group.size, -1))
        return of_group(group, wire)

    run = channel.ahead.run if runs_ahead(wire) else channel.run
    return run(call, execute).to(row.device)


def runs_ahead(wire: torch.Tensor) -> bool:
    """Return whether the host need not wait for a collective of `wire`."""
    return wire.device.type != "cpu"


def _gather(group: Group, wire: torch.Tensor) -> torch.Tensor:
    data = as_bytes(wire, group)
    output = torch.empty(group.size * data.numel(), dtype=torch.uint8, device=data.device)
    group.allgather(output, data).wait()
    return from_bytes(output, (group.size, wire.numel()), wire)


def _sum(group: Group, wire: torch.Tensor) -> torch.Tensor:
    total = wire.clone()
    group.allreduce_(total, Sum).wait()
    return total
