"""`init(comm=)`: a world of some of the launched processes, as in Horovod under mpirun.

The members meet through their own communicator. Several worlds can exist side by side, such as those of
MPI.COMM_WORLD.Split.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import ConfigurationError
from ..launch import detect
from ..rendezvous import find_addresses, mpi
from ..rendezvous.mpi_gather import gather_through_mpi
from ..rendezvous.mpi_start import ending_late_calls
from ..rendezvous.ports import reserved_port
from .process_sets import is_communicator

__all__ = ("part_of_world",)


@contextlib.contextmanager
def part_of_world(comm: Any, env: Mapping[str, str], seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the fields of the launch that `comm` changes, while the block joins the world. Collective over `comm`.

    comm: an mpi4py communicator, a list of ranks, or None for all. seconds: to wait for another member.
    Raises ConfigurationError when this process is not in `comm`, or its members cannot meet.
    """
    if comm is None:
        yield {}
        return
    is_list = not is_communicator(comm)
    launch = detect(env, mpi.world_size)
    if is_list and sorted(comm) == list(range(launch.size)):
        yield {}
        return
    members = _communicator(list(comm), launch.rank, launch.size, launch.starts_mpi) if is_list else comm
    numbers = {"rank": members.Get_rank(), "size": members.Get_size()}
    gather = functools.partial(gather_through_mpi, seconds=seconds, communicator=members)
    is_whole = numbers == {"rank": launch.rank, "size": launch.size}
    if gather(str(is_whole)) == [str(True)] * numbers["size"]:
        yield {}
        return
    with contextlib.ExitStack() as stack:
        host = find_addresses(numbers["rank"], gather, env).first
        port = gather(str(stack.enter_context(reserved_port()) if numbers["rank"] == 0 else None))[0]
        yield {**numbers, "init_method": f"tcp://{host}:{port}", "is_part": True}


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
    library = mpi.library() if starts_mpi else None
    if library is None or library.COMM_WORLD.Get_size() != size:
        raise ConfigurationError(
            f"`comm` must name all {size} ranks, but is {sorted(ranks)} instead: a world of fewer ranks needs mpirun "
            "and mpi4py. Use init(process_sets=) for collectives over some of the ranks."
        )
    with ending_late_calls("MPI_Comm_create_group"):
        return library.COMM_WORLD.Create_group(library.COMM_WORLD.Get_group().Incl(ranks))
