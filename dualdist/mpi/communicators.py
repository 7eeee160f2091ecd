"""Communicators of mpi4py, as in Horovod under mpirun: `init(comm=)`, and process sets made of them.

The members of a communicator meet through it. Several worlds can exist side by side, as after Split.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.backends.base import Group
from ..core.launch import launch_from
from ..core.meeting import Meeting
from ..core.meeting.links import find_addresses
from ..core.meeting.server import reserved_port
from ..core.types import Launch
from ..core.world import current, is_communicator
from ..errors import ConfigurationError
from .meeting import MpiBoard, ending_late_calls, library


def part_of_world(
    comm: Any, launch: Launch, env: Mapping[str, str], seconds: float, stack: contextlib.ExitStack
) -> Launch:
    """Return the launch of the world of `comm`. Collective over `comm`.

    comm: an mpi4py communicator or a list of ranks of `launch`. seconds: to wait for another member. stack: keeps the
    port of the world while it is joined.
    Raises ConfigurationError when this process is not in `comm`, or its members cannot meet.
    """
    is_list = not is_communicator(comm)
    if is_list and sorted(comm) == list(range(launch.size)):
        return launch
    members = _communicator(list(comm), launch.rank, launch.size, launch.starts_mpi) if is_list else comm
    rank, size = members.Get_rank(), members.Get_size()
    is_whole = (rank, size) == (launch.rank, launch.size)
    with Meeting(MpiBoard(Launch("MPI", rank, size), env, members), rank, size, seconds) as meeting:
        own = [is_whole, stack.enter_context(reserved_port()) if rank == 0 else None]
        found = find_addresses(rank, meeting.gather, env, lambda address: own)
    if all(is_whole for is_whole, _ in found.offers):
        return launch
    # The local numbers and MPI's world are those of another world.
    address = f"tcp://{found.first}:{found.offers[0][1]}"
    part = launch_from({"rank": rank, "size": size, "init_method": address}, env)
    return replace(part, launcher=launch.launcher, starts_horovod=launch.starts_horovod, is_part=True)


def _communicator(ranks: Sequence[int], own: int, size: int, starts_mpi: bool) -> Any:
    """Return the communicator of the launched processes `ranks`, in this order. Collective over them."""
    fix = "Pass ranks of the processes that the launcher started, each once, and call init() on these alone."
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < size for rank in ranks) or not ranks:
        raise ConfigurationError(f"`comm` must name ranks below {size}, each once, but is {list(ranks)} instead. {fix}")
    if own not in ranks:
        raise ConfigurationError(
            f"`comm` must name this process, rank {own} of {size}, but is {list(ranks)} instead. {fix}"
        )
    mpi = library() if starts_mpi else None
    if mpi is None or mpi.COMM_WORLD.Get_size() != size:
        raise ConfigurationError(
            f"`comm` must name all {size} ranks, but is {sorted(ranks)} instead: a world of fewer ranks needs mpirun "
            "and mpi4py. Use init(process_sets=) for collectives over some of the ranks."
        )
    with ending_late_calls("MPI_Comm_create_group"):
        return mpi.COMM_WORLD.Create_group(mpi.COMM_WORLD.Get_group().Incl(ranks))


# Process sets. Communicators may differ between ranks, as after `comm.Split`.


def ranks_of(comm: Any) -> list[int]:
    """Return the global ranks of the processes of `comm`, a communicator, in ascending order.

    Raises ValueError if some are not in the world, or MPI did not start the world.
    """
    from mpi4py import MPI  # which has made `comm`

    group, world = comm.Get_group(), _mpi_group_of_world(MPI.COMM_WORLD)
    numbers = current().world
    if (world.Get_size(), world.Get_rank()) != (numbers.size, numbers.rank):
        raise ValueError(
            f"`process_set` must be a list of ranks, because MPI does not have this world of {numbers.size} "
            f"processes: this process is rank {world.Get_rank()} of {world.Get_size()} in MPI. Start the script with "
            "mpirun, and without init(rank=)."
        )
    ranks = sorted(MPI.Group.Translate_ranks(group, range(group.Get_size()), world))
    if MPI.UNDEFINED in ranks:
        raise ValueError(
            f"`process_set` must be a communicator of processes of this world, but {ranks.count(MPI.UNDEFINED)} of its "
            f"{len(ranks)} processes are in another one. Split the communicator that was given to init(comm=)."
        )
    return ranks


def _mpi_group_of_world(comm_world: Any) -> Any:
    """Return the group of MPI with the processes of the world, in the order of their ranks."""
    comm: Any = current().arguments.get("comm")
    if is_communicator(comm):
        return comm.Get_group()
    group, size = comm_world.Get_group(), comm_world.Get_size()
    is_part = comm is not None and len(comm) < size and max(comm) < size
    return group.Incl(comm) if is_part else group


def sets_of_all(group: Group, ranks: list[int]) -> list[list[int]]:
    """Return the different `ranks` that the members of `group`, the world, give, in ascending order. Collective.

    Each is a process set (horovod/common/operations.cc, horovod_init_multi_comm).
    """
    members = set(ranks)
    own = bytes(rank in members for rank in range(group.size))
    return sorted([rank for rank, is_member in enumerate(row) if is_member] for row in set(group.allgather_bytes(own)))
