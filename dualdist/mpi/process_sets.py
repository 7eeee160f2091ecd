"""Communicators of mpi4py as process sets, as in Horovod. They may differ between ranks, as after `comm.Split`."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from ..core.backends.base import Group
from ..core.world.context import current
from ..core.world.process_sets import is_communicator


def ranks_of(comm: Any) -> list[int]:
    """Return the global ranks of the processes of `comm`, a communicator, in ascending order.

    Raises ValueError if some are not in the world, or MPI did not start the world.
    """
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
    return sorted(
        [rank for rank, is_member in enumerate(row) if is_member] for row in set(group.allgather_bytes(own))
    )
