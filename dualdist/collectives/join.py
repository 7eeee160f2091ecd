"""join and barrier, poll and synchronize: collectives without data of their own."""

from __future__ import annotations

from typing import Any

import torch

from ..agreement import kinds
from ..agreement.call import Call
from ..agreement.kinds import WhenJoined
from ..agreement.verdict import Verdict
from ..backends.base import Group
from ..world.context import current
from ..world.process_sets import ProcessSet, channel_of, global_process_set
from .plan import Plan, make_call
from .reduce import contribute_nothing

__all__ = ("barrier", "join", "poll", "stand_in", "synchronize")


def stand_in(call: Call, group: Group, verdict: Verdict) -> None:
    """Do what a rank that has joined does while the others run `call`."""
    given = dict(call.arguments)
    if call.kind.when_joined is WhenJoined.REDUCTION:
        device = torch.device(given["device"])
        contribute_nothing(group, call, device if device.type == "cpu" else torch.device("cuda"))
    elif call.kind.when_joined is WhenJoined.GRADIENTS:
        current().grad_syncs[given["process_set"]][given["grad_sync"]].contribute_nothing()


def join(device: int = -1) -> int:
    """Wait until every rank has joined, taking part in the others' allreduces meanwhile; return the last rank to join.

    For uneven numbers of batches: a rank that has run out joins. It contributes zeros to Sum, Average and Adasum,
    and nothing to Min, Max and Product; Average still divides by the size of the world. Other collectives than
    allreduce, grouped_allreduce, barrier and gradient synchronisation raise HorovodInternalError on the ranks that
    call them meanwhile. Collective over the world.

    device: the GPU for the zeros, as in Horovod; the current one is used.
    """
    return channel_of(global_process_set).join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every member of `process_set` has called it. Collective.

    Ranks that have joined count as having called it. Raises HorovodInternalError as `allreduce` does.
    """
    channel = channel_of(process_set)
    Plan(channel, make_call(kinds.BARRIER, None), lambda group, verdict: None).run()


def poll(handle: int) -> bool:
    """Return whether `synchronize(handle)` would return at once. Local.

    Raises ValueError for a handle that is unknown or was synchronized.
    """
    return current().handles.poll(handle)


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous collective and return its result; None for a handle that is unknown or was used. Local.

    Raises HorovodInternalError when the collective failed.
    """
    return current().handles.synchronize(handle)
