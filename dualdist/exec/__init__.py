"""torchrun's environment under any launcher: `dualdist exec`, `export_environment`, `init_method="dualdist://"`."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

from ..copies import OF_LAUNCHER, RUN_ID, add_copies, agent_variables, names_of_copies, torchrun_variables
from ..core import extension
from ..core.launch import detect, is_one_host, nodes, read_settings, topology, without_copies
from ..core.meeting import Board, Meeting, find_board, given_board, no_board
from ..core.meeting.links import Gather, find_addresses, interface_of
from ..core.meeting.server import reserved_port
from ..core.types import Launch, World
from ..errors import ConfigurationError
from .pmi import PmiBoard, Pmix, connected_to, process_manager

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
"""Its names for the numbers of World."""
_THREADS, _INTERFACE = "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"
"""Variables that keep the user's value, unless it is empty."""
_held = contextlib.ExitStack()
"""Keeps the port until this process ends."""


def export_environment(prepare: Callable[[World], Mapping[str, str]] | None = None) -> None:
    """Set torchrun's variables in `os.environ`, under any launcher. Collective over the launched processes.

    Afterwards `torch.distributed.init_process_group()` joins all processes that the launcher started. MASTER_ADDR and
    MASTER_PORT keep their values if both are set. Otherwise the port stays reserved as long as rank 0 runs. Under
    torchrun only `prepare` is called. After `dualdist exec` or another call, a call without `prepare` does nothing.
    Imports no torch, starts no MPI and uses no GPU.

    prepare: returns more variables for this process. Called when all have met, and before any goes on.

    Raises ConfigurationError when the environment is wrong or a process does not arrive, and on all ranks when
    `prepare` raises it on one of them.
    """
    env = without_copies(os.environ)
    kind = process_manager(env)
    with contextlib.ExitStack() as stack:

        def pmix_size() -> int:
            manager = None if kind is None else stack.enter_context(connected_to(kind))
            return manager.job_size() if isinstance(manager, Pmix) else 0

        launch = detect(env, pmix_size)
        mpi = extension("mpi")
        if mpi is not None:
            mpi.warn_of_smaller_world(launch.rank, launch.size, launch.launcher)
        is_torchrun = RUN_ID in env and launch.sources.get("rank") == "RANK"
        # A launcher that was started since then has not set the copies.
        place = (os.environ.get("RANK"), os.environ.get("WORLD_SIZE"))
        is_ours = RUN_ID in names_of_copies(os.environ) and not os.environ[RUN_ID].startswith(OF_LAUNCHER)
        is_set = is_ours and place == (f"{launch.rank}", f"{launch.size}")
        if is_torchrun and prepare is not None:
            os.environ.update(prepare(World(*[int(env[name]) for name in _OF_TORCHRUN])))
        if is_torchrun or (is_set and prepare is None):
            return
        seconds, gather = read_settings(env).start_timeout_seconds, _alone
        if launch.size > 1:
            board = _board(launch, env, seconds, stack)
            gather = stack.enter_context(Meeting(board, launch.rank, launch.size, seconds)).gather
        variables = _agreed(launch, env, gather, prepare)
    for name in (_THREADS, _INTERFACE):
        if (value := variables.pop(name, "")) and not env.get(name):
            os.environ[name] = value
    add_copies(variables, os.environ)


def _alone(text: str) -> list[str]:
    return [text]


def _board(launch: Launch, env: Mapping[str, str], seconds: float, stack: contextlib.ExitStack) -> Board:
    """Return where the ranks meet, until `stack` ends. seconds: to wait for the other ranks."""
    kind, mpi = process_manager(env), extension("mpi")
    is_wanted = launch.init_method is None and launch.starts_mpi and not is_one_host(launch)
    if kind and is_wanted and not (mpi is not None and mpi.has_started()):
        return PmiBoard(launch, env, stack.enter_context(connected_to(kind)), seconds)
    board = find_board(launch, env, may_start_mpi=False)
    if board is None:
        raise no_board(launch, "use a launcher that serves PMI or PMIx (mpirun, or srun --mpi=pmix)")
    return board


def process_managers_board(launch: Launch, env: Mapping[str, str]) -> Board | None:
    """Return where the ranks of `launch` meet after agreeing on an address through PMI-1 or PMIx, None without them."""
    if not process_manager(env):
        return None
    export_environment()
    return given_board(replace(launch, init_method="env://"), os.environ)


def _agreed(
    launch: Launch, env: Mapping[str, str], gather: Gather, prepare: Callable[[World], Mapping[str, str]] | None
) -> dict[str, str]:
    """Return the variables of this process. Collective over the launched processes."""
    port = _held.enter_context(reserved_port(stays_after_exec=True)) if launch.rank == 0 else None
    own = [launch.local_rank, port, secrets.token_hex(8)]
    addresses = find_addresses(launch.rank, gather, env, lambda address: own)
    local_ranks = [local_rank for local_rank, _, _ in addresses.offers]
    places = list(zip(addresses.nodes, local_ranks, strict=True))
    world = topology(places)[launch.rank]
    more, problem = {}, ""
    try:
        more = {} if prepare is None else dict(prepare(world))
    except ConfigurationError as error:
        problem = f"Rank {launch.rank}: {error}"
    problems = [text for text in gather(problem) if text]
    if problems:
        raise ConfigurationError(problems[0])
    _, port, run_id = addresses.offers[0]
    place = torchrun_variables(world, nodes(places), (addresses.first, port))
    variables = {**place, **agent_variables(run_id, env), **more}
    if world.local_size > 1 and not sys.modules.get("torch"):  # else torch has read it
        variables[_THREADS] = "1"  # as torchrun does
    if len(set(addresses.nodes)) > 1:
        variables[_INTERFACE] = interface_of(addresses.own)  # Gloo takes that of the host's name
    if launch.init_method is not None:
        variables |= {name: env[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in env}
    return variables
