"""Collectives of Python objects.

If pickling an object fails, its error is raised on that rank, and HorovodInternalError on the other ranks. If
unpickling it fails on a rank, its error is raised there alone. In both cases the next call works.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from ..compiling import not_compiled
from ..world.process_sets import ProcessSet, global_process_set
from .plans.objects import (
    plan_allgather_object,
    plan_broadcast_object,
    plan_gather_object,
    plan_scatter_object,
)

__all__ = ("allgather_object", "broadcast_object", "gather_object", "scatter_object")


@not_compiled
def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return rank `root_rank`'s `obj` on every rank: the object itself on the root, a copy elsewhere.

    Collective: every member of `process_set` must call it; `obj` is ignored on the other ranks.
    If pickling fails, its error is raised on the root and HorovodInternalError on the other ranks. If unpickling fails
    on a rank, its error is raised there alone.
    """
    received = plan_broadcast_object(obj, root_rank, name, process_set=process_set).run()
    return obj if received is None else _load(received, root_rank)


@not_compiled
def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return every rank's `obj`, in rank order.

    Collective: every member of `process_set` must call it. Errors as for `broadcast_object`.
    """
    return _load_all(plan_allgather_object(obj, name, process_set=process_set).run(), process_set)


@not_compiled
def gather_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any] | None:
    """Return every rank's `obj` in rank order on rank `root_rank`, None elsewhere.

    Collective: every member of `process_set` must call it. Errors as for `broadcast_object`.
    """
    received = plan_gather_object(obj, root_rank, name, process_set=process_set).run()
    return None if received is None else _load_all(received, process_set)


@not_compiled
def scatter_object(
    objs: Sequence[Any] | None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return a copy of the object for this rank in rank `root_rank`'s list `objs`, which has one object per rank.

    Collective: every member of `process_set` must call it; `objs` is ignored on the other ranks.
    If their number is wrong, ValueError is raised on the root and HorovodInternalError on the other ranks. Other errors
    as for `broadcast_object`.
    """
    return _load(plan_scatter_object(objs, root_rank, name, process_set=process_set).run(), root_rank)


def _load_all(pickles: Sequence[torch.Tensor], process_set: ProcessSet) -> list[Any]:
    return [_load(pickled, rank) for pickled, rank in zip(pickles, process_set.ranks or (), strict=True)]


def _load(pickled: torch.Tensor, rank: int) -> Any:
    """Return the object of `rank`. Raises what unpickling it raises."""
    try:
        return pickle.loads(pickled.cpu().numpy().tobytes())
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"The object of rank {rank} could not be unpickled on this rank.")
        raise
