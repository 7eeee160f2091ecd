"""The world that this process has joined, and leaving it. lifecycle.py joins it.

`_context` and `_inherited` are the only mutable globals in world/. Everything that belongs to a joined world, such as
the registered process sets, is in its Context. The script's own ProcessSet objects change, too: their IDs, and the
ranks of `global_process_set`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from ...errors import HorovodInternalError, NotInitializedError
from .. import accelerator, process_exit
from ..agreement.channel import Channel
from ..agreement.connections import Connections
from ..agreement.observers import Observation
from ..backends.base import Backend
from ..executor import Patience, Worker
from ..extensions import extension, needed
from ..process_exit import never_delete, skip_destructors_at_exit, wait_after_failed_collective
from ..types import Launch, Settings, World

_LAST_SECONDS = 5.0
"""How long a rank that leaves because of an error waits for its device."""
_CHECK_PEERS_SECONDS = 5.0
"""How often a rank looks for lost ranks while the host may wait for its device."""

_context: Context | None = None
"""The world that this process has joined."""
_inherited: Context | None = None
"""In a process that was forked from a rank: the rank's world. It serves only calls that need no communication."""


class Context:
    """One joined world: its backend, this process's numbers, and a channel for each process set."""

    opens_process_group: ClassVar[bool] = True
    """Whether programs find torch's default process group. Not after dualdist.compat's `init`, as with Horovod."""

    def __init__(self, backend: Backend, launch: Launch, settings: Settings) -> None:
        self.backend = backend
        self.launch = launch
        self.settings = settings
        self.process_id = os.getpid()
        """The ID of the process that joined the world; the same in processes that are forked from it."""
        self.arguments: Mapping[str, Any] = MappingProxyType({})
        """The arguments of `init`, with which elastic training joins the next world."""
        self.handles: dict[int, Any] = {}
        """The outstanding asynchronous collectives (core/collectives/plan.py), by their handle."""
        self.channels: dict[int, Channel] = {}
        """The channel of each process set, by its ID."""
        self.process_sets: dict[int, Any] = {}
        """The registered ProcessSet objects, by their ID. See process_sets.py."""
        # These three are known when all ranks have reported where they run, before `init` returns.
        self.world: World
        self.device = torch.device("cpu")
        """The accelerator of this process; the CPU if it sees none."""
        self.hosts: Sequence[str] = ()
        """The host of each rank, as `own_node` names it."""
        self.join_device_index: int | None = None
        """The number of the device that the user has passed to `join`."""
        self._next_set = 0
        self.at_leave = contextlib.ExitStack()
        """What others undo before the channels are closed."""
        self.at_end = contextlib.ExitStack()
        """What they undo after the backend was shut down."""
        self.observation = Observation()
        try:
            if (observation := extension("observation")) is not None:
                self.observation = observation(backend, settings)
            self.add_channel(range(backend.size))
            if backend.runs_ahead:
                looking = Worker(self.check_peers, "dualdist-peers")
                looking.wake()
                self.at_end.callback(looking.stop, 0)
        except BaseException:
            self.close()
            raise

    def add_channel(self, ranks: Sequence[int]) -> int:
        """Open a channel for a process set of `ranks` and return its ID. Collective over the world."""
        set_id = self._next_set
        self._next_set += 1
        self.open_channel(set_id, ranks, among_members=False)
        return set_id

    def open_channel(self, set_id: int, ranks: Sequence[int], *, among_members: bool) -> None:
        """Open the channel of a process set. Collective over the world, or over `ranks` alone if `among_members`."""
        backend, name, seconds = self.backend, f"set {set_id}", self.settings.start_timeout_seconds
        connections = Connections(
            backend.listener,
            name,
            ranks,
            backend.rank,
            self.settings.stall_timeout_seconds,
            seconds,  # all ranks have just met
            self._check_ranks,
        )
        try:
            exchange = functools.partial(connections.allgather_messages, seconds=seconds)
            data, gradients = backend.new_groups(ranks, 2, exchange, among_members)
        except BaseException:
            connections.close()
            raise
        if not self.channels:
            backend.has_lost_rank = connections.has_failed_peer
        make_ahead = functools.partial(backend.new_device_group, ranks) if backend.runs_ahead else None
        self.channels[set_id] = Channel(
            name,
            connections,
            data,
            gradients,
            self.observation.observers,
            functools.partial(_abort, self.channels, backend),  # not a method: without `self`, no cycle
            make_ahead,
        )

    def _check_ranks(self, cause: BaseException | None) -> None:
        """Raise HorovodInternalError if a rank has ended meanwhile. cause: an error that its end may have caused."""
        self.backend.check_start(cause)
        if cause is None and self.backend.has_lost_rank():
            raise HorovodInternalError("a rank has left")

    def _wait_for_device(self) -> None:
        """If no error ends this process, wait for its device, or until `check_peers` finds that a rank has died. Local.

        To destroy the groups would wait for that rank. A look needs the connections, so they are still open.
        """
        device = self.backend.device if self.backend.runs_ahead else None
        if device is not None and not process_exit.has_failed():
            patience = Patience(lambda: process_exit.world_has_failed, self.settings.stall_timeout_seconds)
            needed("streams").wait_for_device(device, patience)

    def _abort_unfinished(self) -> None:
        """If an error ends this process, end the collectives in which the other ranks may not take part. Local.

        To destroy their groups would wait for them.
        """
        device = self.backend.device if self.backend.runs_ahead else None
        if process_exit.has_failed() and device and not accelerator.ends_within(device, _LAST_SECONDS):
            _abort(self.channels, self.backend)

    def check_peers(self) -> float:
        """End the collectives of devices if a rank for which they wait has died. Return when to look again. Local."""
        for channel in list(self.channels.values()):
            channel.check_peers()
        return _CHECK_PEERS_SECONDS

    def close(self) -> None:
        """Leave the world."""
        # The stack calls these functions, the last one first, even if one raises.
        with contextlib.ExitStack() as stack:
            stack.callback(self.at_end.close)
            stack.callback(self.backend.shutdown)
            stack.callback(self.observation.close)
            for channel in self.channels.values():
                stack.callback(channel.close)
            stack.callback(self._abort_unfinished)
            for channel in self.channels.values():
                stack.callback(channel.leave)
            stack.callback(self.at_leave.close)
            stack.callback(self.observation.leave)
            stack.callback(self._wait_for_device)

    def abandon(self) -> None:
        """In a forked process, release what it shares with the parent, without affecting the parent. Local."""
        never_delete(self)
        self.backend.abandon()
        self.observation.abandon()
        for channel in self.channels.values():
            channel.abandon()


def _abort(channels: Mapping[int, Channel], backend: Backend, failed: Channel | None = None) -> None:
    """End the collectives in progress of the channel that has `failed`; on devices, those of all `channels`. Local.

    NCCL may end or destroy one communicator only when the kernels of all others have ended.
    """
    process_exit.world_has_failed = True
    for channel in list(channels.values()):
        if channel is failed or backend.runs_ahead:
            channel.abort(has_failed=channel is failed)
    backend.abort_default_group()


def current() -> Context:
    """Return the joined world, for calls that communicate.

    Raises NotInitializedError before `init()`, after `shutdown()`, and in a process that was forked from a rank.
    """
    if _context is None:
        raise NotInitializedError(_why_outside())
    return _context


def current_or_inherited() -> Context:
    """Return the joined world, or in a process that was forked from a rank, that rank's world.

    For calls that need no communication. Raises NotInitializedError before `init()` and after `shutdown()`.
    """
    return _context or _inherited or current()


def is_initialized() -> bool:
    """Return whether this process, or the rank from which it was forked, has joined a world. Local."""
    return (_inherited or _context) is not None


def is_forked() -> bool:
    """Return whether this process was forked from one that had joined a world."""
    return _inherited is not None


def _why_outside() -> str:
    if _inherited is None:
        return NotInitializedError.before_init
    return (
        f"This process was forked from rank {_inherited.backend.rank} (process {_inherited.process_id}), and only that "
        "process can communicate with the other ranks. Call collectives and init() there: workers of a DataLoader may "
        "call rank(), size() and the like, but no collectives. dualdist.spawn starts processes that join a world."
    )


def enter_world(context: Context) -> None:
    """Let `context` be the joined world, until this process ends or calls `leave_world`."""
    global _context
    _context = context
    process_exit.world_has_failed = False
    atexit.register(leave_world)  # torch 2.13 aborts if a gloo group still exists when Python ends


def leave_world() -> None:
    """Leave the world, if one is joined. Safe to call twice."""
    global _context
    context, _context = _context, None
    atexit.unregister(leave_world)
    if context is not None:
        context.close()


def _after_fork() -> None:
    """In the forked process, keep the world only for calls that need no communication."""
    global _context, _inherited
    if _context is None:
        return
    _inherited, _context = _context, None
    gc.freeze()  # what the rank would still have collected is not collected here: see skip_destructors_at_exit
    atexit.unregister(leave_world)
    skip_destructors_at_exit()
    _inherited.abandon()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(wait_after_failed_collective)  # here, so that it runs last: the newest function runs first
