"""The process set that the argument `process_group` means: in torch's interface it may be a group of torch."""

from __future__ import annotations

from typing import Any

from ..backends.torch_interface import group_of_mesh, ranks_of
from ..checks import instance, wrong
from ..world.process_sets import ProcessSet, check_process_set, global_process_set, process_set_of_ranks

__all__ = ("set_of_group", "set_of_group_or_mesh")


def set_of_group(process_group: Any, *, registered: bool) -> ProcessSet:
    """Return the process set that `process_group` means; None means all ranks.

    Collective over its members if it is a group of torch whose ranks have no process set yet. Raises TypeError, or
    BackendUnavailableError for a group of torch that the backend cannot use.
    """
    if process_group is None:
        return global_process_set
    ranks = ranks_of(process_group)
    if ranks is not None:
        return process_set_of_ranks(ranks)
    rule = "a ProcessSet or a ProcessGroup of torch that this rank belongs to"
    instance("process_group", process_group, ProcessSet, rule, "Make one with add_process_set(ranks).")
    check_process_set(process_group, "process_group", registered=registered)
    return process_group  # type: ignore[no-any-return]


def set_of_group_or_mesh(process_group: Any, device_mesh: Any) -> ProcessSet:
    """Return the process set that one of the two arguments means. Raises ValueError if there are two, or TypeError."""
    if device_mesh is None:
        return set_of_group(process_group, registered=True)
    if process_group is not None:
        raise ValueError(
            "`device_mesh` must be None if `process_group` is passed, but is not. Pass one of them."
        )
    group = group_of_mesh(device_mesh)
    if group is None:
        raise wrong(
            "device_mesh", "a DeviceMesh of one dimension", device_mesh, "Pass one, or mesh['dp'].", TypeError
        )
    return set_of_group(group, registered=True)
