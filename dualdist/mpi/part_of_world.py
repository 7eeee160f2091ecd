"""`init(comm=)`: a world of some of the launched processes, as in Horovod under mpirun.

The members meet through their own communicator. Several worlds can exist side by side, as after Split.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core.launch import detect
from ..core.meeting.addresses import find_addresses
from ..core.meeting.member import Meeting
from ..core.meeting.server import reserved_port
from ..core.types import Launch
from ..core.world.process_sets import is_communicator
from ..errors import ConfigurationError
from .meeting import MpiBoard, ending_late_calls, library, world_size


@contextlib.contextmanager
def part_of_world(comm: Any, env: Mapping[str, str], seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the fields of Launch that differ in the world of `comm`. The block joins it. Collective over `comm`.

    comm: an mpi4py communicator or a list of ranks. seconds: to wait for another member.
    Raises ConfigurationError when this process is not in `comm`, or its members cannot meet.
    """
    is_list = not is_communicator(comm)
    launch = detect(env, world_size)
    if is_list and sorted(comm) == list(range(launch.size)):
        yield {}
        return
    members = _communicator(list(comm), launch.rank, launch.size, launch.starts_mpi) if is_list else comm
    rank, size = members.Get_rank(), members.Get_size()
    is_whole = (rank, size) == (launch.rank, launch.size)
    with contextlib.ExitStack() as stack:
        with Meeting(MpiBoard(Launch("MPI", rank, size), env, members), rank, size, seconds) as meeting:
            are_whole = meeting.gather(str(is_whole)) == [str(True)] * size
            host = find_addresses(rank, meeting.gather, env).first
            port = meeting.gather(str(stack.enter_context(reserved_port()) if rank == 0 else None))[0]
        part = {"rank": rank, "size": size, "init_method": f"tcp://{host}:{port}", "is_part": True}
        yield {} if are_whole else part


def _communicator(ranks: Sequence[int], own: int, size: int, starts_mpi: bool) -> Any:
    """Return the communicator of the launched processes `ranks`, in this order. Collective over them."""
    fix = "Pass ranks of the processes that the launcher started, each once, and call init() on these alone."
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < size for rank in ranks) or not ranks:
        raise ConfigurationError(
            f"`comm` must name ranks below {size}, each once, but is {list(ranks)} instead. {fix}"
        )
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
