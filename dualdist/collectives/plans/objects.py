"""The plans of the collectives of Python objects, sent with pickle, or with cloudpickle if it is installed.

The results are pickles. The public functions unpickle them after the collective: unpickling runs code of the objects'
classes. If that code raises an exception, it must not look like a failure of the collective.
"""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from ...agreement import call_kinds
from ...agreement.verdict import Verdict
from ...backends.base import Group
from ...checks import items
from ...world.process_sets import ProcessSet, channel_of
from ..movement import allgather_rows, alltoall_rows, gather_rows
from .arguments import check_root
from .plan import Plan, make_call, planned

__all__ = ("plan_allgather_object", "plan_broadcast_object", "plan_gather_object", "plan_scatter_object")

Pickles = tuple[torch.Tensor, ...]
"""The pickled objects of all ranks, in rank order, each (n,) uint8."""


def _dump(obj: Any) -> torch.Tensor:
    """Return `obj` pickled, (n,) uint8. Uses cloudpickle if it is installed, as Horovod does."""
    if importlib.util.find_spec("cloudpickle") is not None:
        import cloudpickle

        return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _split(rows: torch.Tensor, counts: Sequence[int]) -> Pickles:
    pickles: Pickles = rows.split(list(counts))
    return pickles


@planned(call_kinds.BROADCAST_OBJECT)
def plan_broadcast_object(
    obj: Any, root_rank: int, name: str | None = None, *, process_set: ProcessSet
) -> Plan[torch.Tensor | None]:
    """Return the plan of a broadcast_object. Its result: the root's object; None on the root, which has it."""
    channel, (root_rank, root) = channel_of(process_set), check_root(root_rank, process_set)
    is_root = channel.group.rank == root
    data = _dump(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    call = make_call(call_kinds.BROADCAST_OBJECT, name, count=data.numel(), root_rank=root_rank)

    def execute(group: Group, verdict: Verdict) -> torch.Tensor | None:
        sent = data if is_root else torch.empty(verdict.counts[root], dtype=torch.uint8)
        sent = sent.to(group.wire_device(sent.device))
        group.broadcast_(sent, root).wait()
        return None if is_root else sent

    return Plan(channel, call, execute)


@planned(call_kinds.ALLGATHER_OBJECT)
def plan_allgather_object(obj: Any, name: str | None = None, *, process_set: ProcessSet) -> Plan[Pickles]:
    """Return the plan of an allgather_object. Its result: the objects of all ranks."""
    channel = channel_of(process_set)
    data = _dump(obj)
    call = make_call(call_kinds.ALLGATHER_OBJECT, name, count=data.numel())

    def execute(group: Group, verdict: Verdict) -> Pickles:
        (gathered,) = allgather_rows(group, [data], verdict.counts)
        return _split(gathered, verdict.counts)

    return Plan(channel, call, execute)


@planned(call_kinds.GATHER_OBJECT)
def plan_gather_object(
    obj: Any, root_rank: int, name: str | None = None, *, process_set: ProcessSet
) -> Plan[Pickles | None]:
    """Return the plan of a gather_object. Its result: the objects of all ranks on the root, None elsewhere."""
    channel, (root_rank, root) = channel_of(process_set), check_root(root_rank, process_set)
    data = _dump(obj)
    call = make_call(call_kinds.GATHER_OBJECT, name, count=data.numel(), root_rank=root_rank)

    def execute(group: Group, verdict: Verdict) -> Pickles | None:
        rows, counts = gather_rows(group, data, root, verdict.counts)
        return _split(rows, counts) if group.rank == root else None

    return Plan(channel, call, execute)


@planned(call_kinds.SCATTER_OBJECT)
def plan_scatter_object(
    objs: Sequence[Any] | None, root_rank: int, name: str | None = None, *, process_set: ProcessSet
) -> Plan[torch.Tensor]:
    """Return the plan of a scatter_object. Its result: this rank's object."""
    channel, (root_rank, root) = channel_of(process_set), check_root(root_rank, process_set)
    size, is_root = channel.group.size, channel.group.rank == root
    rule = f"a list with one object for each of {size} ranks on the root"
    given = items("objs", objs, rule, "Wrap each rank's object.") if is_root else []
    if is_root and len(given) != size:
        raise ValueError(f"`objs` must be {rule}, but has {len(given)} objects instead.")
    pickled = [_dump(obj) for obj in given]
    data = torch.cat(pickled) if pickled else torch.empty(0, dtype=torch.uint8)
    splits = [each.numel() for each in pickled] or [0] * size
    call = make_call(call_kinds.SCATTER_OBJECT, name, count=data.numel(), root_rank=root_rank)
    return Plan(channel, call, lambda group, verdict: alltoall_rows(group, data, splits, verdict.counts)[0])
