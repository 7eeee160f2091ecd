"""The world that this process has joined: the package's only mutable global."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ..agreement.channel import Channel, StandIn
from ..agreement.connections import Connections
from ..agreement.handles import HandleTable
from ..agreement.stall import StallWatch
from ..agreement.timeline import Timeline
from ..backends import Backend, check_transport, choose
from ..errors import ConfigurationError, NotInitializedError, WorldMismatchError
from ..launch import detect, topology
from ..rendezvous import own_node
from ..types import Launch, Settings, World

__all__ = ("Context", "current", "device", "is_initialized", "join_world", "leave_world", "read_settings")

logger = logging.getLogger("dualdist")

_context: Context | None = None


class Context:
    """One joined world: the backend, who we are in it, and a line of collectives per process set."""

    def __init__(self, backend: Backend, launch: Launch, settings: Settings, stand_in: StandIn) -> None:
        self.backend = backend
        self.launch = launch
        self.settings = settings
        self.arguments: Mapping[str, Any] = MappingProxyType({})
        """What `init` was called with, to join the world anew in the same way."""
        self.handles = HandleTable()
        self.channels: dict[int, Channel] = {}
        self.grad_syncs: dict[int | None, list[Any]] = defaultdict(list)
        """Every gradient synchronisation of a process set; its place is its name to the other members."""
        self.timeline = Timeline(backend)
        self._stand_in = stand_in
        self._next_set = 0
        self.watch = StallWatch(backend.store, backend.rank, settings)
        try:
            self.add_channel(range(backend.size))
            self.world = self._confirm_world()
            if settings.timeline is not None:
                self.timeline.open(settings.timeline, settings.timeline_mark_cycles)
        except BaseException:
            self.close()
            raise

    def add_channel(self, ranks: Sequence[int]) -> int:
        """Open a line for a process set of `ranks` and return its id. Collective over the world."""
        number = self._next_set
        self._next_set += 1
        backend, name = self.backend, f"set {number}"
        data, gradients = (backend.new_group(ranks) for _ in range(2))
        connections = Connections(
            backend.store, name, ranks, backend.rank, backend.address, self.settings.stall_timeout_seconds
        )
        self.channels[number] = Channel(
            name, connections, data, gradients, self.watch, self.timeline, self._stand_in
        )
        return number

    def close(self) -> None:
        """Leave the world."""
        with contextlib.ExitStack() as stack:  # from the last to the first, whatever one of them raises
            stack.callback(self.backend.shutdown)
            stack.callback(self.timeline.close)
            for channel in self.channels.values():
                stack.callback(channel.close)
            for sync in [sync for known in self.grad_syncs.values() for sync in known]:
                stack.callback(sync.forget_world)
            stack.callback(self.watch.close)

    def _confirm_world(self) -> World:
        """Ask every rank where it runs. Raises WorldMismatchError when the backend joined another world."""
        launched, joined = self.launch, self.backend
        told = launched.launcher != "python" and not launched.elastic
        if told and (launched.size, launched.rank) != (joined.size, joined.rank):
            raise WorldMismatchError(
                f"World size must be the {launched.describe('size')} that {launched.launcher} started, but is "
                f"{joined.size} instead in {joined.name}, where this process is rank {joined.rank} and should be rank "
                f"{launched.describe('rank')}. "
                "Do not start the backend before dualdist.init(), or start it with all ranks; start MPI with the "
                "mpirun of the library that the backend was built for."
            )
        mine = json.dumps([own_node(), launched.local_rank]).encode().ljust(256)
        places = [json.loads(text) for text in self.channels[0].group.exchange(mine)]
        return topology([(host, local_rank) for host, local_rank in places])[joined.rank]


def current() -> Context:
    """Return the joined world. Raises NotInitializedError before `init()` and after `shutdown()`."""
    if _context is None:
        raise NotInitializedError("dualdist has not been initialized; call dualdist.init() first.")
    return _context


def is_initialized() -> bool:
    """Return whether this process has joined a world."""
    return _context is not None


def read_settings(env: Mapping[str, str]) -> Settings:
    """Return what `env` sets. Raises ConfigurationError for a value that is not a number of seconds."""
    seconds = {}
    for field in ("stall_warn_seconds", "stall_timeout_seconds"):
        name = f"DUALDIST_{field.upper()}"
        if name not in env:
            continue
        try:
            seconds[field] = float(env[name])
        except ValueError:
            seconds[field] = 0.0
        if not 0 < seconds[field] < math.inf:  # nor NaN
            raise ConfigurationError(
                f"`{name}` must be a positive, finite number of seconds, but is {env[name]!r} instead."
            )
    timeline = env.get("HOROVOD_TIMELINE", "")  # DYNAMIC is Horovod's word for "start_timeline() will follow"
    return Settings(
        **seconds,
        timeline=None if timeline in ("", "DYNAMIC") else timeline,
        timeline_mark_cycles=env.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0"),
    )


def join_world(
    stand_in: StandIn,
    backend: str | None,
    transport: str | None,
    override: Mapping[str, Any],
    env: Mapping[str, str],
) -> Context:
    """Join the world that `env` and `override` describe; the same again when joined already. Collective."""
    global _context
    if _context is not None:
        return _context
    settings = read_settings(env)
    launch = _launch(override, env)
    if launch.ignored:
        logger.warning(
            "%s is ignored: this process was not started by a launcher and trains alone. Start it with srun, "
            "torchrun or `dualdist run`, or unset it.",
            ", ".join(launch.ignored),
        )
    transport = transport or env.get("DUALDIST_TRANSPORT") or None
    check_transport(transport)
    chosen, reason = choose(backend, transport, launch, env)
    _context = Context(chosen.start(launch, settings, env, transport), launch, settings, stand_in)
    _register_exit()
    if _context.backend.rank == 0:
        logger.info(
            "dualdist runs on %s (%s), %s; %d processes, rank from %s; rank 0 is at %s.",
            _context.backend.name,
            _context.backend.transport,
            reason,
            _context.backend.size,
            launch.sources.get("rank", launch.launcher),
            _context.backend.address,
        )
    return _context


def leave_world() -> None:
    """Leave the world, if one is joined. Safe to call twice."""
    global _context
    context, _context = _context, None
    if context is not None:
        context.close()


def _launch(override: Mapping[str, Any], env: Mapping[str, str]) -> Launch:
    given = {key: value for key, value in override.items() if value is not None}
    if not given:
        return detect(env)
    detected = Launch("init") if given.keys() >= {"rank", "size"} else detect(env)
    sources = dict(detected.sources) | {
        key: f"init({'world_size' if key == 'size' else key}=)" for key in given
    }
    launch = dataclasses.replace(detected, **given, sources=MappingProxyType(sources))
    if launch.size > 1 and launch.init_method is None and launch.launcher == "init":
        raise ConfigurationError(
            "`init_method` must be given beside rank and world_size, but is None instead. Use 'tcp://host:port', "
            "'file:///path' or 'env://', as in torch.distributed."
        )
    if not 0 <= launch.rank < launch.size:
        raise ConfigurationError(
            f"`rank` must be at least 0 and less than world_size={launch.size}, but is {launch.rank} instead."
        )
    return launch


_exit_process: int | None = None


def _register_exit() -> None:
    """Leave the world when the process ends: torch 2.13 aborts when a gloo group is left to the interpreter's end."""
    global _exit_process
    if _exit_process is None:
        _exit_process = os.getpid()
        atexit.register(lambda: leave_world() if os.getpid() == _exit_process else None)


def device() -> torch.device:
    """Return where this process trains: its GPU by local rank, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", current().world.local_rank % torch.cuda.device_count())
    return torch.device("cpu")
