"""The world that this process has joined, and joining and leaving it.

`_context` and `_inherited` are the only mutable globals in world/. Everything that belongs to a joined world, such as
the registered process sets, is in its Context. The script's own ProcessSet objects change, too: their IDs, and the
ranks of `global_process_set`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import hashlib
import os
import pickle
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch

from ...errors import HorovodInternalError, NotInitializedError, WorldMismatchError, logger
from ...observation.dump import Dump
from ...observation.timeline import Timeline
from ...observation.usage import write
from .. import accelerator, process_exit
from ..agreement.channel import Channel
from ..agreement.connections import Connections
from ..agreement.watch import Contact, StallWatch
from ..backends import choose
from ..backends.base import Backend, Exchange, Group
from ..extensions import extension
from ..launch import DeviceView, choose_devices, launch_from, nodes, topology
from ..launch.environment import add_copies, is_on, remove_copies, torchrun_variables
from ..meeting import mpi_size
from ..meeting.addresses import own_node
from ..meeting.server import reserved_port
from ..process_exit import never_delete, skip_destructors_at_exit, wait_after_failed_collective
from ..types import Launch, Settings, World

# Warns when the processes of a host start more threads than it has CPUs, which can make training several times slower.
#
# torchrun, `dualdist run` and `spawn` set OMP_NUM_THREADS. mpirun, srun and horovodrun do not, so each of their
# processes starts one thread per CPU.


class CpuThreads(NamedTuple):
    """The threads of a process, and the CPUs that it may use."""

    threads: int
    cpus: int
    first_cpu: int
    """The lowest number among the CPUs. Processes that are bound to other CPUs differ in it."""

    @classmethod
    def of_this_process(cls) -> CpuThreads:
        """Return those of this process. The number of threads is 0 if the user has set OMP_NUM_THREADS."""
        cpus = os.sched_getaffinity(0)
        threads = 0 if os.environ.get("OMP_NUM_THREADS") else torch.get_num_threads()
        return cls(threads, len(cpus), min(cpus))


def warn_of_too_many_threads(processes: Iterable[tuple[str, CpuThreads]]) -> None:
    """Log one warning if, on a host, processes that share CPUs have more threads than CPUs. Local.

    processes: the host, as `own_node` names it, and the threads of every process.
    """
    for (host, mine), count in Counter(processes).items():
        if count > 1 and mine.threads * count > mine.cpus:
            best = max(1, mine.cpus // count)
            logger.warning(
                "On %s, %d processes with %d threads each share %d CPUs. This can make training several times slower. "
                "Set OMP_NUM_THREADS=%d for all processes (with Open MPI: mpirun -x OMP_NUM_THREADS=%d).",
                *(host.rpartition("-")[0], count, mine.threads, mine.cpus, best, best),
            )
            return


# What each rank reports about itself when it has joined a world.

_BYTES = 1024
"""The length of a pickled report. All have the same, padded with spaces."""


@dataclass(frozen=True)
class Presence:
    """Where a rank runs, and what it has there."""

    host: str
    local_rank: int | None
    contact: Contact | None
    threads: CpuThreads
    devices: tuple[str, int]
    """A name for the set of devices that the rank sees, and their number."""
    master: tuple[str, int] | None
    """On rank 0: its address, and a port that is free on its host."""

    @classmethod
    def of_this_process(
        cls, local_rank: int | None, contact: Contact | None, master: tuple[str, int] | None
    ) -> Presence:
        """Return the report of this process."""
        names = accelerator.visible()
        devices = hashlib.sha256(repr(names).encode()).hexdigest()[:8], len(names)
        return cls(own_node(), local_rank, contact, CpuThreads.of_this_process(), devices, master)

    @property
    def view(self) -> DeviceView:
        """What is needed to choose the rank's device."""
        name, count = self.devices
        return DeviceView(self.host, self.local_rank, [f"{name}.{index}" for index in range(count)])


NewGroups = Callable[[Sequence[int], int, Exchange], list[Group]]

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
        """The outstanding asynchronous collectives (core/collectives/handles.py), by their handle."""
        self.channels: dict[int, Channel] = {}
        """The channel of each process set, by its ID."""
        self.process_sets: dict[int, Any] = {}
        """The registered ProcessSet objects, by their ID. See process_sets.py."""
        self.device = torch.device("cpu")
        """The accelerator of this process, chosen when the ranks have met; the CPU if it sees none."""
        self.hosts: Sequence[str] = ()
        """The host of each rank, as `own_node` names it."""
        self.join_device_index: int | None = None
        """The number of the device that the user has passed to `join`."""
        self.timeline = Timeline(backend)
        self._next_set = 0
        self.at_leave = contextlib.ExitStack()
        """What others undo before the channels are closed."""
        self._undo = contextlib.ExitStack()
        """What `close` undoes."""
        self.watch = StallWatch(backend.rank, backend.size, backend.address, settings)
        try:
            self.add_channel(range(backend.size))
            self.world = self._confirm_world()
            if backend.runs_ahead:
                self.watch.check = self.check_peers
            self._undo.callback(self.watch.usage.measure_loading())
            if is_on(settings.env, "DUALDIST_SUMMARY"):
                total = functools.partial(self.watch.usage.total, backend.rank, backend.size)
                self._undo.callback(lambda where: write(total(), where), settings.env["DUALDIST_SUMMARY"])
            self.timeline.open_if_asked(settings.env)
        except BaseException:
            self.close()
            raise

    def add_channel(self, ranks: Sequence[int]) -> int:
        """Open a channel for a process set of `ranks` and return its ID. Collective over the world."""
        set_id = self._next_set
        self._next_set += 1
        self._open_channel(set_id, ranks, self.backend.new_groups)
        return set_id

    def add_members_channel(self, ranks: Sequence[int]) -> int:
        """Open a channel for `ranks` and return its ID, which is negative. Collective over `ranks` alone."""
        set_id = -1 - zlib.crc32(repr(list(ranks)).encode())  # the same on all members, without a message
        self._open_channel(set_id, ranks, self.backend.new_members_groups)
        return set_id

    def _open_channel(self, set_id: int, ranks: Sequence[int], new_groups: NewGroups) -> None:
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
            data, gradients = new_groups(ranks, 2, exchange)
        except BaseException:
            connections.close()
            raise
        make_ahead = (
            (lambda: backend.new_members_groups(ranks, 1, exchange)[0]) if backend.runs_ahead else None
        )
        self.channels[set_id] = Channel(
            name,
            connections,
            data,
            gradients,
            self.watch,
            self.timeline,
            functools.partial(_abort, self.channels, backend),  # not a method: without `self`, no cycle
            make_ahead,
        )

    def _check_ranks(self, cause: BaseException | None) -> None:
        """Raise HorovodInternalError if a rank has ended meanwhile. cause: an error that its end may have caused."""
        self.backend.check_start(cause)
        if cause is None and self.channels and self.channels[0].group.has_lost_member():
            raise HorovodInternalError("a rank has left")

    def _abort_unfinished(self) -> None:
        """If an error ends this process, end the collectives in which the other ranks may not take part. Local."""
        if process_exit.has_failed() and not all(one.ends_soon() for one in self.channels.values()):
            _abort(self.channels, self.backend)

    def parts_of(self, whole: Channel) -> list[Channel]:
        """Return the channels with calls that run ahead among some members of `whole`, in one order on all ranks."""
        used = [one for one in self.channels.values() if one is not whole and one.ahead.is_used]
        parts = (one for one in used if set(one.group.ranks) <= set(whole.group.ranks))
        return sorted(parts, key=lambda one: one.group.ranks)

    def check_peers(self) -> None:
        """End the collectives of devices if a rank for which they wait has died. Local."""
        for channel in list(self.channels.values()):
            channel.check_peers()

    def close(self) -> None:
        """Leave the world."""
        # The stack calls these functions, the last one first, even if one raises.
        with contextlib.ExitStack() as stack:
            stack.callback(self._undo.close)
            stack.callback(self.backend.shutdown)
            stack.callback(self.timeline.close)
            for channel in self.channels.values():
                stack.callback(channel.close)
            stack.callback(self._abort_unfinished)
            for channel in self.channels.values():
                stack.callback(channel.leave)
            stack.callback(self.at_leave.close)
            stack.callback(self.watch.close)

    def abandon(self) -> None:
        """In a forked process, release what it shares with the parent, without affecting the parent. Local."""
        never_delete(self)
        self.backend.abandon()
        self.watch.abandon()
        self.dump.close(is_forked=True)
        for channel in self.channels.values():
            channel.abandon()

    def _confirm_world(self) -> World:
        """Return this process's numbers. Collective. Raises WorldMismatchError if the backend joined another world."""
        launched, joined = self.launch, self.backend
        has_numbers = launched.by_launcher and not launched.elastic
        if has_numbers and (launched.size, launched.rank) != (joined.size, joined.rank):
            what, field = ("Rank", "rank") if launched.size == joined.size else ("World size", "size")
            raise WorldMismatchError(
                f"{what} must be the {launched.describe(field)} that {launched.launcher} has set, but is "
                f"{getattr(joined, field)} instead in {joined.name}. This process is rank {joined.rank} of "
                f"{joined.size} there and should be rank {launched.describe('rank')} of {launched.size}. "
                "Do not start the backend before dualdist.init(), or start it with all ranks. Start MPI with the "
                "mpirun of the library that the backend was built for."
            )
        master = (joined.address, self._undo.enter_context(reserved_port())) if joined.rank == 0 else None
        mine = Presence.of_this_process(launched.local_rank, self.watch.contact, master)
        group = self.channels[0].group
        report = pickle.dumps(mine).ljust(_BYTES)
        answers = joined.start_step(lambda: group.allgather_bytes(report))
        ranks: list[Presence] = [pickle.loads(answer) for answer in answers]
        self.watch.start([rank.contact for rank in ranks if rank.contact is not None])
        self.dump = Dump(self.watch, self.settings.env.get("DUALDIST_DUMP_DIR"), repr(ranks[0].contact))
        self._undo.callback(self.dump.close)
        self.hosts = [rank.host for rank in ranks]
        if (mpi := extension("mpi")) is not None:
            mpi.warn_of_smaller_world(joined.rank, joined.size, launched.launcher)
        if joined.rank == 0:
            warn_of_too_many_threads((rank.host, rank.threads) for rank in ranks)
        self.device = joined.device or self._device([rank.view for rank in ranks])
        places = [(rank.host, rank.local_rank) for rank in ranks]
        world = topology(places)[joined.rank]
        assert ranks[0].master is not None
        self._export(torchrun_variables(world, nodes(places), ranks[0].master))
        return world

    def _export(self, variables: Mapping[str, str]) -> None:
        """Set those of `variables` that are absent or empty in the environment until this process leaves the world.

        For frameworks and scripts that look for torchrun's variables. Users often export MASTER_* alone.
        """
        added = {name: value for name, value in variables.items() if not os.environ.get(name)}
        add_copies(added, os.environ)
        self._undo.callback(remove_copies, added, os.environ)

    def _device(self, views: Sequence[DeviceView]) -> torch.device:
        index = choose_devices(views)[self.backend.rank]
        return torch.device("cpu") if index is None else torch.device(str(accelerator.kind()), index)


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


def join_world(
    backend: str | None,
    transport: str | None,
    override: Mapping[str, Any],
    env: Mapping[str, str],
    settings: Settings,
) -> Context:
    """Join the world that `env` and `override` describe. Collective.

    settings: those in `env`.

    Raises NotInitializedError in a process that was forked from a rank.
    """
    global _context
    if _inherited is not None:
        return current()
    launch = launch_from(override, env, mpi_size)
    if launch.ignored:
        logger.warning(
            "%s is ignored: no launcher started this process, so it trains alone. Start it with srun, "
            "torchrun or `dualdist run`, or unset it.",
            ", ".join(launch.ignored),
        )
    chosen = choose(backend, transport, launch, env)
    started = chosen.backend.start(launch, settings, env, chosen.transport)
    _context = Context(started, launch, settings)
    process_exit.world_has_failed = False
    atexit.register(leave_world)  # torch 2.13 aborts if a gloo group still exists when Python ends
    if started.rank == 0:
        logger.info(
            "dualdist runs on %s (%s), %s; %d processes, rank from %s; rank 0 is at %s.",
            started.name,
            started.transport,
            chosen.reason,
            started.size,
            launch.sources.get("rank", launch.launcher),
            started.address,
        )
    return _context


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
