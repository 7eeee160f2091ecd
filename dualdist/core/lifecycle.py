"""init and shutdown: joining a world, comparing it with what was launched, and leaving it; and what scripts ask of it.

Scripts ask for Horovod's six numbers of this process, and the names of its backend, transport and launcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from ..errors import ConfigurationError, WorldMismatchError, logger
from . import accelerator, extension, needed
from .backends import choose
from .backends.base import Backend
from .checks import configuration, integer, items, number, text, wrong
from .launch import detect, launch_from, nodes, read_settings, topology, without_copies
from .meeting.links import own_node
from .meeting.server import reserved_port
from .types import NEVER_SECONDS, Launch, Settings
from .world import (
    Context,
    ProcessSet,
    current,
    current_or_inherited,
    enter_world,
    forget_world,
    is_communicator,
    is_forked,
    is_initialized,
    leave_world,
    register_world,
)

_joining = threading.RLock()
"""Held by the thread that joins the world. Another one that calls init() meanwhile finds the world joined."""


def _after_fork() -> None:
    """In the forked process, release the lock of a thread that is not there."""
    global _joining
    _joining = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
    *,
    backend: str | None = None,
    transport: str | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: timedelta | float | None = None,
) -> None:
    """Join the world. Collective: every launched process must call it. A second call only checks its arguments.

    Args:
        comm: an mpi4py communicator or a list of ranks of the launcher. None: all ranks. Its processes form the world,
            in its order. Other processes can form other worlds. Fewer than all ranks need mpirun and mpi4py, and use
            Gloo or NCCL.
        process_sets: process sets to register, or "dynamic" (sets can always be added later).
        backend: "torch", "horovod" or "local". None: DUALDIST_BACKEND, else a backend that already runs in this
            process, else the usual backend of the launcher.
        transport: "nccl", "xccl", "hccl", "cncl", "gloo" or "mpi". None: DUALDIST_TRANSPORT, else the best one here.
        init_method, rank, world_size: as in torch.distributed.init_process_group: "tcp://host:port", "file:///path" or
            "env://".
        timeout: how long a collective waits for a rank before it raises StallError, in seconds or as in
            torch.distributed.init_process_group. None: DUALDIST_STALL_TIMEOUT_SECONDS, else 600 s. How long this call
            waits for ranks is DUALDIST_START_TIMEOUT_SECONDS, else 60 s.

    Raises:
        ConfigurationError: an argument or the environment is wrong, or the backend is not installed; or a world is
            joined already, with another `backend`, `transport`, `rank` or `world_size`.
        WorldMismatchError: the backend joined a different world from the one that the launcher started.
        NotInitializedError: this process was forked from one that had joined a world.
    """
    given = dict(locals())
    with configuration():
        comm, sets = _checked(comm, process_sets, backend, transport)
        if timeout is not None:
            timeout = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
            fix = "Pass a timedelta, or seconds."
            timeout = number("timeout", timeout, above=0, most=NEVER_SECONDS, fix=fix)
    with _joining:
        if is_initialized():
            _check_joined(backend=backend, transport=transport, rank=rank, world_size=world_size)
            return
        env = without_copies(os.environ)
        if timeout is not None:
            env["DUALDIST_STALL_TIMEOUT_SECONDS"] = str(timeout)
        settings = read_settings(env)
        limits = env, settings.start_timeout_seconds
        place = {"init_method": init_method, "rank": rank, "size": world_size}
        launch = launch_from(place, env, lambda: needed("mpi").world_size_within(*limits))
        with contextlib.ExitStack() as stack:
            if launch.starts_mpi and (mpi := extension("mpi")) is not None:
                stack.enter_context(mpi.limited_start(*limits)).announce(launch)
            if comm is not None:
                launch = needed("part_of_world")(comm, launch, *limits, stack)
            context = join_world(backend, transport, launch, env, settings)
        context.arguments = given | {"comm": comm, "process_sets": sets}  # lists, since iterators have ended
        try:
            register_world(sets, comm)
        except BaseException:
            shutdown()
            raise


def _checked(comm: Any, process_sets: Any, backend: Any, transport: Any) -> tuple[Any, list[Any]]:
    """Return `comm`, a list of ranks as a list, and the process sets to register.

    Raises TypeError or ValueError for an argument that no world accepts. core/launch/__init__.py checks the others.
    """
    rule, fix = "a communicator, a list of ranks or None", "Pass a list of ranks or an mpi4py communicator."
    if isinstance(comm, str):
        raise wrong("comm", rule, comm, "Pass names as init(backend=) and init(transport=).", TypeError)
    if comm is not None and not is_communicator(comm):
        ranks = items("comm", comm, rule, fix)
        comm = [integer(f"comm[{place}]", rank, least=0, fix=fix) for place, rank in enumerate(ranks)]
    sets: list[Any] = []
    is_dynamic = isinstance(process_sets, str) and process_sets.lower() == "dynamic"
    if process_sets is not None and not is_dynamic:
        fix = "Pass a list such as [[0, 1], [2, 3]]."
        sets = items("process_sets", process_sets, 'a list of process sets, or "dynamic"', fix)
        for process_set in sets:
            if not isinstance(process_set, ProcessSet) and not is_communicator(process_set):
                items("process_sets", process_set, "a list of process sets or of lists of ranks", fix)
    for name, value in (("backend", backend), ("transport", transport)):
        if value is not None:
            text(name, value)
    return comm, sets


def _check_joined(**given: str | int | None) -> None:
    """Raise ConfigurationError unless the joined world is as `given`; None: as it is."""
    joined = current().backend
    own = {"backend": joined.name, "transport": joined.transport, "rank": joined.rank, "world_size": joined.size}
    for name, value in given.items():
        if value not in (None, own[name]):
            rule = f"{own[name]!r}, as in the world that is joined"
            fix = "Call shutdown() before you join another one."
            raise wrong(name, rule, value, fix, ConfigurationError)


def join_world(
    asked: str | None, transport: str | None, launch: Launch, env: Mapping[str, str], settings: Settings
) -> Context:
    """Join the world that `launch` describes. Collective. asked: the backend. settings: those in `env`."""
    if launch.ignored:
        logger.warning(
            "%s is ignored: no launcher started this process, so it trains alone. Start it with srun, "
            "torchrun or `dualdist run`, or unset it.",
            ", ".join(launch.ignored),
        )
    chosen = choose(asked, transport, launch, env)
    backend = chosen.backend.start(launch, settings, env, chosen.transport)
    context = Context(backend, launch, settings)
    try:
        _check_numbers(launch, backend)
        if context.opens_process_group:
            backend.open_process_group()
        _finish_start(context)
    except BaseException:
        context.close()
        raise
    enter_world(context)
    if backend.rank == 0:
        source = launch.sources.get("rank", launch.launcher)
        facts = backend.name, backend.transport, chosen.reason, backend.size, source, backend.address
        logger.info("dualdist runs on %s (%s), %s; %d processes, rank from %s; rank 0 is at %s.", *facts)
    return context


def _check_numbers(launched: Launch, joined: Backend) -> None:
    """Raise WorldMismatchError if the backend has joined another world than the launcher has started. Local."""
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


def _finish_start(context: Context) -> None:
    """Let each rank report where it runs and what it has there, and set this process's numbers. Collective."""
    launch, backend, kind = context.launch, context.backend, accelerator.kind()
    devices = None if kind is None else extension("devices")
    master = (backend.address, context.at_end.enter_context(reserved_port())) if backend.rank == 0 else None
    own = own_node(), launch.local_rank, devices and devices.summary(), context.observation.contact, master
    reports = [json.loads(text) for text in backend.finish_start(json.dumps(own))]
    context.hosts, local_ranks, seen, contacts, masters = zip(*reports, strict=True)
    context.observation.start(contacts)
    if "mpi4py.MPI" in sys.modules and (mpi := extension("mpi")) is not None:
        mpi.warn_of_smaller_world(backend.rank, backend.size, launch.launcher)
    places = list(zip(context.hosts, local_ranks, strict=True))
    context.world = topology(places)[backend.rank]
    if backend.device is not None:
        context.device = backend.device
    elif devices is not None:
        context.device = devices.device_of(backend.rank, places, seen)
    if (copies := extension("copies")) is not None:
        context.at_end.enter_context(copies.exported(context.world, nodes(places), masters[0]))


def shutdown() -> None:
    """Leave the world. Runs automatically when the process ends.

    Collective: call it on every rank, because ranks that stay cannot complete another call. It does nothing if no world
    is joined, or if this process was forked from one that had joined it.
    """
    if not is_forked():
        forget_world()
        leave_world()


def rank() -> int:
    """Return the rank of this process in the world, from 0. Local. Raises NotInitializedError before `init()`."""
    return current_or_inherited().world.rank


def size() -> int:
    """Return the number of processes in the world. Local. Raises NotInitializedError before `init()`."""
    return current_or_inherited().world.size


def local_rank() -> int:
    """Return the rank of this process on its node, from 0. Local. Raises NotInitializedError before `init()`."""
    return current_or_inherited().world.local_rank


def local_size() -> int:
    """Return the number of processes on this node. Local. Raises NotInitializedError before `init()`."""
    return current_or_inherited().world.local_size


def cross_rank() -> int:
    """Return the index among processes of this local rank. Local. Raises NotInitializedError before `init()`."""
    return current_or_inherited().world.cross_rank


def cross_size() -> int:
    """Return the number of processes of this local rank. Local. Raises NotInitializedError before `init()`."""
    return current_or_inherited().world.cross_size


def is_homogeneous() -> bool:
    """Return whether all nodes run equally many processes. Local. Raises NotInitializedError before `init()`."""
    world = current_or_inherited().world
    return world.local_size * world.cross_size == world.size


def backend_name() -> str:
    """Return which backend runs: "torch", "horovod" or "local". Local. Raises NotInitializedError before `init()`."""
    return current_or_inherited().backend.name


def transport_name() -> str:
    """Return what transfers the data: "nccl", "xccl", "hccl", "cncl", "gloo", "mpi" or "local". Local.

    Raises NotInitializedError before `init()`.
    """
    return current_or_inherited().backend.transport


def launcher_name() -> str:
    """Return what started this process, such as "torchrun". Local. Raises NotInitializedError before `init()`."""
    return current_or_inherited().launch.launcher


def launch_info() -> Launch:
    """Return what the launcher's environment variables say about this process. Local. It works before `init()`.

    Raises ConfigurationError if the variables contradict each other.
    """
    return detect(os.environ)


# The device on which this process trains.


def device() -> torch.device:
    """Return the accelerator of this process, such as cuda:1; the CPU if it sees none. Local.

    `init` chooses it: the device to which the transport is bound, else the visible device with the local rank's number.
    A process that sees one device takes that one.

    Raises NotInitializedError before `init()` on a machine with an accelerator.
    """
    return current_or_inherited().device if accelerator.kind() else torch.device("cpu")
