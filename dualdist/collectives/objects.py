"""Collectives of Python objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..world.process_sets import ProcessSet, global_process_set
from .plans.objects import (
    plan_allgather_object,
    plan_broadcast_object,
    plan_gather_object,
    plan_scatter_object,
)

__all__ = ("allgather_object", "broadcast_object", "gather_object", "scatter_object")


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return rank `root_rank`'s `obj` on every rank: the object itself on the root, a copy elsewhere.

    Collective: every member of `process_set` must call it, in the same order; `obj` is ignored on the other ranks.
    If pickling fails, its error is raised on the root and HorovodInternalError on the other ranks.
    """
    return plan_broadcast_object(obj, root_rank, name, process_set=process_set).run()


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return every rank's `obj`, in rank order.

    Collective: every member of `process_set` must call it, in the same order. If pickling fails on a rank, its error
    is raised there and HorovodInternalError on the other ranks.
    """
    return plan_allgather_object(obj, name, process_set=process_set).run()


def gather_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any] | None:
    """Return every rank's `obj` in rank order on rank `root_rank`, None elsewhere.

    Collective: every member of `process_set` must call it, in the same order. Errors as for `allgather_object`.
    """
    return plan_gather_object(obj, root_rank, name, process_set=process_set).run()


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
