"""Collectives of Python objects, sent with pickle, or with cloudpickle if it is installed, as in Horovod."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from ..agreement import kinds
from ..backends.base import Group
from ..world.process_sets import ProcessSet, channel_of, global_process_set
from .movement import allgather_rows, alltoall_rows
from .plans.arguments import check_root
from .plans.plan import Plan, make_call, planned

__all__ = ("allgather_object", "broadcast_object", "gather_object", "scatter_object")


def _dump(obj: Any) -> torch.Tensor:
    if importlib.util.find_spec("cloudpickle") is not None:
        import cloudpickle

        return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _load(data: torch.Tensor) -> Any:
    return pickle.loads(data.cpu().numpy().tobytes())


@planned(kinds.BROADCAST_OBJECT)
def plan_broadcast_object(
    obj: Any, root_rank: int, name: str | None, *, process_set: ProcessSet
) -> Plan[Any]:
    root, channel = check_root(root_rank, process_set), channel_of(process_set)
    is_root = channel.group.rank == root
    data = _dump(obj) if is_root else torch.empty(0, dtype=torch.uint8)

    def execute(group: Group, verdict: Any) -> Any:
        length = verdict.counts[root]
        sent = data if is_root else torch.empty(length, dtype=torch.uint8)
        sent = sent.to(group.wire_device(sent.device))
        group.broadcast_(sent, root).wait()
        return obj if is_root else _load(sent)

    return Plan(
        channel, make_call(kinds.BROADCAST_OBJECT, name, count=data.numel(), root_rank=root_rank), execute
    )


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return rank `root_rank`'s `obj` on every rank: the object itself on the root, a copy elsewhere.

    Collective: every member of `process_set` must call it, in the same order; `obj` is ignored on the other ranks.
    If pickling fails, its error is raised on the root and HorovodInternalError on the other ranks.
    """
    return plan_broadcast_object(obj, root_rank, name, process_set=process_set).run()


@planned(kinds.ALLGATHER_OBJECT)
def plan_allgather_object(obj: Any, name: str | None, *, process_set: ProcessSet) -> Plan[list[Any]]:
    data = _dump(obj)

    def execute(group: Group, verdict: Any) -> list[Any]:
        (gathered,) = allgather_rows(group, [data], verdict.counts)
        return [_load(part) for part in gathered.split(verdict.counts)]

    return Plan(channel_of(process_set), make_call(kinds.ALLGATHER_OBJECT, name, count=data.numel()), execute)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return every rank's `obj`, in rank order.

    Collective: every member of `process_set` must call it, in the same order. If pickling fails on a rank, its error
    is raised there and HorovodInternalError on the other ranks.
    """
    return plan_allgather_object(obj, name, process_set=process_set).run()


@planned(kinds.GATHER_OBJECT)
def plan_gather_object(
    obj: Any, root_rank: int, name: str | None, *, process_set: ProcessSet
) -> Plan[list[Any] | None]:
    root, channel = check_root(root_rank, process_set), channel_of(process_set)
    data = _dump(obj)
    splits = [data.numel() if index == root else 0 for index in range(channel.group.size)]

    def execute(group: Group, verdict: Any) -> list[Any] | None:
        rows, counts = alltoall_rows(group, data, splits)
        return [_load(part) for part in rows.split(counts)] if group.rank == root else None

    return Plan(channel, make_call(kinds.GATHER_OBJECT, name, root_rank=root_rank), execute)


def gather_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any] | None:
    """Return every rank's `obj` in rank order on rank `root_rank`, None elsewhere.

    Collective: every member of `process_set` must call it, in the same order. Errors as for `allgather_object`.
    """
    return plan_gather_object(obj, root_rank, name, process_set=process_set).run()


@planned(kinds.SCATTER_OBJECT)
def plan_scatter_object(
    objs: Sequence[Any] | None, root_rank: int, name: str | None, *, process_set: ProcessSet
) -> Plan[Any]:
    root, channel = check_root(root_rank, process_set), channel_of(process_set)
    size, is_root = channel.group.size, channel.group.rank == root
    if is_root and (objs is None or len(objs) != size):
        count = "None" if objs is None else f"{len(objs)} objects"
        raise ValueError(
            f"`objs` must hold one object for each of {size} ranks on the root, but is {count} instead."
        )
    parts = [_dump(obj) for obj in objs] if is_root and objs is not None else []
    data = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    splits = [part.numel() for part in parts] or [0] * size
    call = make_call(kinds.SCATTER_OBJECT, name, root_rank=root_rank)
    return Plan(channel, call, lambda group, verdict: _load(alltoall_rows(group, data, splits)[0]))


def scatter_object(
    objs: Sequence[Any] | None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return a copy of the object for this rank in rank `root_rank`'s list `objs`, which has one object per rank.

    Collective: every member of `process_set` must call it, in the same order; `objs` is ignored on the other ranks.
    If their number is wrong, ValueError is raised on the root and HorovodInternalError on the other ranks.
    """
    return plan_scatter_object(objs, root_rank, name, process_set=process_set).run()
