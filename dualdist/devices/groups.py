"""The groups of torch.distributed with which devices exchange tensors, and what ends them after a failure.

A group whose members alone make it has a name of theirs, since torch.distributed counts groups: it would name it after
the number of groups that the process has made, or is in, and these numbers may differ.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import inspect
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..core import accelerator
from ..core.backends import torch_groups
from ..core.backends.base import Exchange, Group, Work
from ..core.backends.torch_groups import THROUGH_HOST, TorchGroup, TorchGroups, adopted_config, config_text, wrapped
from ..core.process import in_thread, never_delete, skip_destructors_at_exit
from ..errors import HorovodInternalError

_MARGIN = timedelta(seconds=30)
_ABORT_SECONDS = 30.0
"""How long to wait for the end of NCCL's kernels after a failure."""
# Before torch 2.6, destroying a group ended its kernels too.
abort_process_group = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)


def transport_timeout(timeout: timedelta, device: torch.device | None) -> timedelta:
    """Return the timeout of the process groups, if dualdist reports a stall after `timeout`.

    NCCL's watchdog ends the process at its timeout (ProcessGroupNCCL.cpp, `SkipCleanUp`), and its time begins earlier.
    The margin lets the ranks report the stall before. device: to which the transport is bound.
    """
    return timeout if device is None else timeout + _MARGIN


def carried_types(config: Mapping[str, str]) -> frozenset[str]:
    """Return the types of devices whose tensors need no copy to the host."""
    return frozenset(kind for kind, name in config.items() if kind == "cpu" or name not in THROUGH_HOST)


class DeviceGroup(TorchGroup):
    """A group that torch.distributed has made."""

    def __init__(
        self, ranks: Sequence[int], rank: int, process_group: Any, carried: frozenset[str], device: torch.device | None
    ) -> None:
        """carried: types of devices. device: to which the transport is bound."""
        super().__init__(ranks, rank, process_group)
        self._carried, self._device = carried, device
        self.keeps_last = False
        """Whether `unfinished` is used. The last collective keeps its tensors."""
        self._last: dist.Work | None = None

    @property
    def is_aborted(self) -> bool:
        """Whether the abort of the process group has begun."""
        return self._made in _aborts

    @property
    def _pg(self) -> Any:
        """The process group. Raises HorovodInternalError after `abort`: NCCL must get no collective meanwhile."""
        if self.is_aborted:
            raise HorovodInternalError("this rank has given up its collectives")
        return self._made

    @_pg.setter
    def _pg(self, process_group: Any) -> None:
        self._made = process_group

    def wire_device(self, device: torch.device) -> torch.device:
        if device.type not in self._carried:
            return torch.device("cpu")
        # NCCL refuses tensors on another GPU than its own, as of a model on two of them.
        return self._device if self._device is not None and device.type == self._device.type else device

    def _started(self, work: dist.Work, tensor: torch.Tensor) -> Work:
        if self.keeps_last:
            self._last = work
        return super()._started(work, tensor)

    def unfinished(self) -> object:
        last = self._last
        with contextlib.suppress(RuntimeError):  # it has failed
            return None if last is None or last.is_completed() else last
        return None

    def set_timeout(self, timeout: timedelta) -> None:
        if not self.is_aborted:
            super().set_timeout(transport_timeout(timeout, self._device))

    def abort(self) -> None:
        """Begin to end the kernels of NCCL, which otherwise wait for a dead peer until the timeout.

        In a thread: NCCL may wait until the kernel of another communicator ends, which is aborted next
        (https://github.com/pytorch/pytorch/issues/119797).
        """
        if self._made is not None and self._device is not None:
            _abort_once(self._made, functools.partial(_abort_device_part, self._made, self._device))

    def close(self) -> None:
        process_group, self._made = self._made, None
        if process_group is None or not dist.is_initialized():
            return
        if process_group not in _aborts:
            dist.destroy_process_group(process_group)  # it waits for the collectives of the group
        elif _aborts_end([process_group]):
            abort_process_group(process_group)
        else:
            never_delete(process_group)
            skip_destructors_at_exit()


_aborts: weakref.WeakKeyDictionary[Any, tuple[Future[None], float]] = weakref.WeakKeyDictionary()
"""The aborts of process groups that have begun, and until when to wait for each.

Two of one group at the same time may free the same memory in NCCL.
"""
_beginning_abort = threading.Lock()


def _abort_once(process_group: Any, step: Callable[[], None]) -> None:
    """Begin `step`, which aborts a process group, unless its abort has begun."""
    end = time.monotonic() + _ABORT_SECONDS
    with _beginning_abort:
        if process_group in _aborts:
            return
        try:
            _aborts[process_group] = in_thread(step), end
        except RuntimeError:  # the interpreter ends
            ended = Future[None]()
            _aborts[process_group] = ended, end
            step()
            ended.set_result(None)


def _aborts_end(process_groups: Iterable[Any]) -> bool:
    """Wait for the aborts of groups, 30 s after the start of each at most. Return whether all that began have ended."""
    found = [_aborts[group] for group in process_groups if group in _aborts]
    return all(concurrent.futures.wait([abort], max(0.0, end - time.monotonic())).done for abort, end in found)


def _abort_device_part(process_group: Any, device: torch.device) -> None:
    accelerator.bind(device)  # each thread has a current device of its own
    with contextlib.suppress(RuntimeError):  # its watchdog may have aborted it
        backend = process_group._get_backend(device)
        (backend.abort if hasattr(backend, "abort") else backend._shutdown)()  # before torch 2.6


def abort_process_groups() -> None:
    """Let what programs have in progress in groups of torch.distributed raise, before they leave the world. Local.

    With Gloo it ends when another rank closes its connections, by `shutdown` or at its end. Waits at most 30 s.
    """
    groups = [group for group in dist.distributed_c10d._world.pg_map if hasattr(group, "abort")]  # since torch 2.7
    for group in groups:
        _abort_once(group, group.abort)
    _aborts_end(groups)


def keep_process_groups() -> None:
    """Never delete the groups of torch.distributed, because a thread still waits for a collective. Local.

    Gloo's destructor waits for it. When it fails later, its thread must not find a process that ends.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        never_delete(group)
    skip_destructors_at_exit()


class DefaultGroup(torch_groups.DefaultGroup):
    """torch's default group, bound to a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def _options(self, timeout: timedelta) -> dict[str, Any]:
        return {"timeout": transport_timeout(timeout, self._device), "device_id": self._device}

    def abort(self) -> None:
        if self._own is None:
            return
        for one in list(dist.distributed_c10d._world.pg_map):
            if self._device.type in carried_types(adopted_config(one)):
                _abort_once(one, functools.partial(_abort_device_part, one, self._device))

    def _destroy(self) -> None:
        groups = list(dist.distributed_c10d._world.pg_map)
        if not _aborts_end(groups):
            keep_process_groups()
        elif any(one in _aborts for one in groups):
            abort_process_group()
        else:
            super()._destroy()


_members_groups_made: weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()
"""For each default group of torch: how many groups were made in its world among the members alone, by their ranks.

Processes may join a world that have been in other worlds before, and in different ones.
"""
_hash_ranks = getattr(dist.distributed_c10d, "_hash_ranks_to_str", None)
"""Names a group that only its members make. None in torch 2.4, which hashes the ranks alone."""


class DeviceGroups(TorchGroups):
    """The groups of one world, made by torch.distributed."""

    def _connected(self, ranks: Sequence[int], count: int, exchange: Exchange, among_members: bool) -> list[Group]:
        make = self._make_members_group if among_members else self._make_group
        return [make(ranks) for _ in range(count)]

    def make_for_device(self, ranks: Sequence[int]) -> Group:
        """Return a group over `ranks`, for tensors on the device alone. Collective over `ranks` alone."""
        made = self._make_members_group(ranks, without=("cpu",))
        made.keeps_last = True
        self._groups.append(made)
        return made

    def _make_group(self, ranks: Sequence[int], without: Collection[str] = (), **options: Any) -> DeviceGroup:
        """without: types of devices whose tensors it need not carry."""
        config, device = self._config, self._device
        with wrapped():
            process_group = dist.new_group(
                list(ranks),
                backend=config_text({kind: config[kind] for kind in config.keys() - without}),
                timeout=transport_timeout(self._timeout, device),
                **options,
            )
        own = process_group if self._rank in ranks else None
        return DeviceGroup(ranks, self._rank, own, carried_types(config), device)

    def _make_members_group(self, ranks: Sequence[int], without: Collection[str] = ()) -> DeviceGroup:
        c10d: Any = dist.distributed_c10d
        torch_world, key = c10d._world, tuple(ranks)
        world: Any = dist.group.WORLD
        before, bound = torch_world.group_count, world.bound_device_id
        made = _members_groups_made.setdefault(world, Counter())
        made[key] += 1
        name = hashlib.sha1(f"{key} {made[key]}".encode(), usedforsecurity=False).hexdigest()
        # torch 2.4 has no such argument: it connects at the first collective.
        takes_device = "device_id" in inspect.signature(dist.new_group).parameters
        options = {"device_id": bound} if takes_device else {}
        try:
            c10d._hash_ranks_to_str = lambda _: name
            # From a default group that is bound to a device, NCCL would split the communicator, which needs all ranks.
            world.bound_device_id = None
            return self._make_group(ranks, without, use_local_synchronization=True, **options)
        finally:
            world.bound_device_id = bound
            c10d._hash_ranks_to_str = _hash_ranks
            # torch counts the groups of a process, and names others by it. Other ranks do not count this one.
            if dist.group.WORLD is world:  # a thread that was abandoned may come here in the next world
                torch_world.group_count = before
