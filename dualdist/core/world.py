"""The world that this process has joined, its process sets, and leaving it. lifecycle.py joins it.

`_context` and `_inherited` are the only mutable globals here. Everything that belongs to a joined world, such as the
registered process sets, is in its Context. The script's own ProcessSet objects change, too: their IDs, and the ranks of
`global_process_set`.

Process sets are for collectives over some of the ranks. Names and rules are those of horovod/common/process_sets.py.
Communicators of mpi4py, and meshes and groups of torch, can stand for process sets: extensions know their ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

import torch

from ..errors import NotInitializedError
from . import accelerator, extension, needed, process
from .agreement.call import Call, Data, Kind, call_site
from .agreement.channel import Channel
from .agreement.connections import Connections, Verdict
from .agreement.guard import Observation
from .backends.base import Backend, Group
from .checks import instance, integer, items
from .process import Patience, Worker, never_delete, skip_destructors_at_exit, wait_after_failed_collective
from .types import Launch, Settings, World

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
        """The registered ProcessSet objects, by their ID."""
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
            timeout=self.settings.stall_timeout_seconds,
            connect_timeout=seconds,  # all ranks have just met
            check=backend.check_start,
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
        abort = functools.partial(_abort, self.channels, backend)  # not a method: without `self`, no cycle
        observe = self.observation.observer
        self.channels[set_id] = Channel(name, connections, data, gradients, observe, abort, make_ahead)

    def _wait_for_device(self) -> None:
        """If no error ends this process, wait for its device, or until `check_peers` finds that a rank has died. Local.

        To destroy the groups would wait for that rank. A look needs the connections, so they are still open.
        """
        device = self.backend.device if self.backend.runs_ahead else None
        if device is not None and not process.has_failed():
            patience = Patience(lambda: process.world_has_failed, self.settings.stall_timeout_seconds)
            needed("streams").wait_for_device(device, patience)

    def _abort_unfinished(self) -> None:
        """If an error ends this process, end the collectives in which the other ranks may not take part. Local.

        To destroy their groups would wait for them.
        """
        device = self.backend.device if self.backend.runs_ahead else None
        if process.has_failed() and device and not accelerator.ends_within(device, _LAST_SECONDS):
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
    process.world_has_failed = True
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
    process.world_has_failed = False
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


T = TypeVar("T")
ADD_PROCESS_SET = Kind("add_process_set", "ADD_PROCESS_SET", Data.NONE)
REMOVE_PROCESS_SET = Kind("remove_process_set", "REMOVE_PROCESS_SET", Data.NONE)


class ProcessSet:
    """Some of the ranks of the world. Once the set is registered, collectives can run among them.

    ranks: global ranks in any order, or an mpi4py communicator, which may be another one on each rank, as after
    `comm.Split`. Register the set with `init(process_sets=)` or `add_process_set`; until then `process_set_id` is None.
    Raises ValueError when a rank is not an integer, negative or occurs twice.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    """Global ranks in ascending order. Those of a communicator are known when the set is registered."""
    mpi_comm: Any = None
    """The mpi4py communicator that was given. That of `global_process_set`: what was given to `init`."""

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        if is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
        else:
            self.ranks = _checked_ranks("ranks_or_comm", ranks_or_comm)

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSet:
        """Return the set itself: the copy of a model or an optimizer uses the same set."""
        return self

    def _registered(self) -> bool:
        return self.process_set_id is not None and is_initialized()

    def size(self) -> int | None:
        """Return the number of ranks, None while the set is not registered."""
        return len(self.ranks or ()) if self._registered() else None

    def rank(self) -> int | None:
        """Return this process's index in the set, None while the set is not registered.

        Raises ValueError when this process is not part of the set.
        """
        if not self._registered():
            return None
        if current_or_inherited().world.rank not in (self.ranks or ()):
            raise ValueError("Process is not part of provided process set.")
        return (self.ranks or []).index(current_or_inherited().world.rank)

    def included(self) -> bool | None:
        """Return whether this process is part of the set."""
        return None if self.ranks is None else current_or_inherited().world.rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class TorchGroup(Protocol):
    """A DeviceMesh with one dimension, or a ProcessGroup of torch, for type checkers."""

    def size(self) -> int: ...


ProcessSetLike: TypeAlias = ProcessSet | TorchGroup
"""What the arguments `process_set` may be."""


def is_communicator(value: Any) -> bool:
    """Return whether `value` is a communicator of mpi4py."""
    return hasattr(value, "Get_group")


def _checked_ranks(name: str, ranks: Any) -> list[int]:
    """Return the ranks in ascending order. Raises TypeError or ValueError, which names the parameter `name`."""
    given = items(name, ranks, "a list of ranks", "Pass whole numbers, such as [0, 1].")
    try:
        checked = sorted(integer(f"{name}[{place}]", rank, least=0) for place, rank in enumerate(given))
    except TypeError as error:
        raise ValueError(str(error)) from None  # as in Horovod
    if len(set(checked)) != len(checked):
        raise ValueError(f"`{name}` must not repeat a rank, but is {checked} instead. Name each rank once.")
    return checked


global_process_set = ProcessSet([])
"""All ranks of the world. Joining a world sets its `ranks`, as in Horovod."""
global_process_set.process_set_id = 0


def register_world(process_sets: Sequence[ProcessSet | Sequence[int]], comm: Any = None) -> None:
    """Register the global process set and then `process_sets`. Collective over the world. comm: as for `init`."""
    context = current()
    global_process_set.ranks = list(range(context.world.size))
    global_process_set.mpi_comm = comm if is_communicator(comm) else None
    context.process_sets[0] = global_process_set
    for process_set in process_sets:
        add_process_set(process_set)


def forget_world() -> None:
    """Mark every set but the global one as not registered. Does nothing if no world is joined. Local."""
    if not is_initialized():
        return
    process_sets: dict[int, ProcessSet] = current().process_sets
    for process_set in process_sets.values():
        if process_set is not global_process_set:
            process_set.process_set_id = None
    process_sets.clear()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set and return it. Collective: every rank of the world must call it, members or not.

    If the ranks give different communicators of mpi4py, the set of each is registered, in ascending order
    (horovod/common/operations.cc, horovod_init_multi_comm).

    Raises ValueError if the set is registered already, is empty, or has a rank or a process that is not in the world;
    BackendUnavailableError if the installed Horovod cannot connect its ranks; StallError if a rank stops in this call.
    """
    with reporting(ADD_PROCESS_SET):
        added = _checked(process_set)
    context = current()

    def add(members: list[int]) -> tuple[list[int], int]:
        return members, context.add_channel(members)

    for members, set_id in _for_each_set(ADD_PROCESS_SET, added, add):
        registered = added if members == added.ranks else ProcessSet(members)
        registered.process_set_id = set_id
        context.process_sets[set_id] = registered
    return added


def _for_each_set(kind: Kind, process_set: ProcessSet, change: Callable[[list[int]], T]) -> list[T]:
    """Return `change(ranks)` of each different set that a rank of the world gives, in ascending order. Collective.

    Only those of communicators may differ.
    """
    ranks, is_list = process_set.ranks or [], process_set.mpi_comm is None
    argument = ("process_set", tuple(ranks)) if is_list else ("communicator", True)

    def execute(group: Group, verdict: Verdict) -> list[T]:
        return list(map(change, [ranks] if is_list else needed("communicators").sets_of_all(group, ranks)))

    return current().channels[0].run(Call(kind, (argument,), site=call_site()), execute)


def _checked(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Return `process_set` as a ProcessSet. Raises ValueError if it cannot be registered."""
    context = current()
    added = process_set
    if is_communicator(added):
        added = ProcessSet(added)
    elif not isinstance(added, ProcessSet):
        added = ProcessSet(_checked_ranks("process_set", added))
    if added.mpi_comm is not None:
        added.ranks = needed("communicators").ranks_of(added.mpi_comm)
    ranks = added.ranks or []
    if not ranks or ranks[0] < 0 or ranks[-1] >= context.world.size:
        raise ValueError(
            f"`process_set` must name at least one rank, all below {context.world.size}, but has {ranks} instead."
        )
    if any(other.ranks == ranks for set_id, other in context.process_sets.items() if set_id >= 0):
        use = "hvd.global_process_set" if len(ranks) == context.world.size else "the one that is there"
        raise ValueError(
            f"A process set with ranks {ranks} is registered already; every set must be registered once. Use {use}."
        )
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set and return whether it was registered. Collective: every rank of the world must call it.

    If it was made of a communicator, the sets that the other ranks give are removed as well, as `add_process_set` adds
    them. The global process set cannot be removed. Raises TypeError if `process_set` is no ProcessSet.
    """
    context = current()
    with reporting(REMOVE_PROCESS_SET):
        fix = "Pass what add_process_set() returned."
        instance("process_set", process_set, ProcessSet, "a ProcessSet", fix)
    set_id = process_set.process_set_id
    if set_id is None or set_id <= 0 or context.process_sets.get(set_id) is not process_set:
        return False

    def remove(members: list[int]) -> None:
        for number, removed in list(context.process_sets.items()):
            if number > 0 and removed.ranks == members:
                context.channels.pop(number).close()
                del context.process_sets[number]
                removed.process_set_id = None

    _for_each_set(REMOVE_PROCESS_SET, process_set, remove)
    return True


def channel_of(process_set: ProcessSetLike) -> Channel:
    """Return the channel of `process_set`.

    Raises TypeError if the set is not registered, as Horovod does, and ValueError if this process is not part of it.
    """
    context = current()
    if not isinstance(process_set, ProcessSet) or process_set.process_set_id is None:
        process_set = checked_process_set(process_set, registered=True)
    set_id = process_set.process_set_id
    channel = None if set_id is None else context.channels.get(set_id)
    if channel is None:
        raise ValueError(f"`process_set` must be registered, but is {process_set} instead.")
    if channel.group.rank < 0:
        raise ValueError(f"Process {context.world.rank} is not part of {process_set}.")
    return channel


def checked_process_set(process_set: Any, name: str = "process_set", *, registered: bool = False) -> ProcessSet:
    """Return the process set that the argument `name` means. registered: it must be in use.

    Collective over its members if it is a mesh dimension or a group of torch whose ranks have no process set yet.
    Raises TypeError, ValueError if this rank is not in the group, BackendUnavailableError if it cannot be connected.
    """
    process_set = _converted(process_set, name)
    rule = "a ProcessSet, a DeviceMesh of one dimension or a ProcessGroup of torch"
    instance(name, process_set, ProcessSet, rule, "Use add_process_set(ranks), or a dimension: mesh['data'].")
    if registered and process_set.process_set_id is None:
        raise TypeError(
            f"`{name}` must be registered, but is {process_set} instead. "
            "Call add_process_set(), or give it to init(process_sets=)."
        )
    return process_set  # type: ignore[no-any-return]


def _converted(value: Any, name: str) -> Any:
    """Return the process set that `value`, a group of torch, stands for; anything else as it is."""
    if isinstance(value, ProcessSet) or (groups := extension("torch_groups")) is None:
        return value
    ranks = groups.ranks_of(value)
    return value if ranks is None else groups.process_set_of(ranks, name)


@contextlib.contextmanager
def reporting(kind: Kind, process_set: Any = None) -> Iterator[None]:
    """If the `with` block raises before this rank makes a call of `kind`, let the other ranks raise, too.

    Therefore they do not wait for this rank. Nothing is reported without a world, or on a rank outside the set. If
    `process_set` is no process set, the error is reported to the whole world.
    """
    try:
        yield
    except Exception as error:
        report(kind, process_set, error)
        raise


def report(kind: Kind, process_set: Any, error: Exception) -> None:
    """Do what `reporting` does when its block raises `error`."""
    with contextlib.suppress(TypeError, ValueError):
        known = _converted(process_set, "process_set")
        channel_of(known if isinstance(known, ProcessSet) else global_process_set).fail(kind, error)
