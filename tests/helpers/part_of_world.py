"""A script for mpirun -np 3: joins worlds of communicators that differ between ranks. See test_part_of_world.py.

part_of_world.py BACKEND members-FORM|sets-FORM ...
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from mpi4py import MPI

import dualdist as hvd
from dualdist.core.world import current

backend = sys.argv[1]
launched = MPI.COMM_WORLD
number = launched.Get_rank()


def join_members(form: str) -> None:
    """Join a world of the ranks of a communicator, or of a list, twice."""
    members = {0: [2, 0], 1: [1], 2: [2, 0]}[number]
    if form == "split":
        comm: Any = launched.Split(color=number % 2, key=-number)
    elif form == "all":
        comm, members = launched, [0, 1, 2]
    elif form == "reversed":
        comm, members = launched.Split(color=0, key=-number), [2, 1, 0]
    else:
        comm = members
    for _ in range(2):
        hvd.init(comm, ([0] for _ in range(len(members) > 1)), backend=backend)  # type: ignore[arg-type]
        assert hvd.backend_name() == backend
        total = hvd.allreduce(torch.tensor([1.0 + number]), op=hvd.Sum).item()
        sent = hvd.broadcast_object(number, root_rank=0)
        numbers = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
        hvd.shutdown()
    place = members.index(number)
    assert numbers == (place, len(members), place, len(members)), numbers
    assert total == sum(1.0 + other for other in members), total
    assert sent == members[0], sent


def check(process_set: hvd.ProcessSet, set_id: int, ranks: list[int]) -> None:
    assert (process_set.process_set_id, process_set.ranks) == (set_id, ranks)
    assert process_set.included()
    total = hvd.allreduce(torch.tensor([1.0 + hvd.rank()]), op=hvd.Sum, process_set=process_set).item()
    assert total == sum(1.0 + member for member in ranks), total


def register_process_sets(form: str) -> None:
    """Join a world, with process sets of communicators."""
    world: MPI.Comm = launched
    if form == "reversed":
        world = launched.Split(color=0, key=-number)
    elif form != "whole":
        world = launched.Split(color=number // 2, key=-number if form == "list" else number)
    rank, size = world.Get_rank(), world.Get_size()
    members = [[1, 0], [1, 0], [2]][number]
    parity = world.Split(color=rank % 2, key=-rank)
    given = hvd.ProcessSet(parity)
    assert given.ranks is None
    sets = [given] if size > 1 else []  # alone, a process has the set of all ranks already
    hvd.init(comm=members if form == "list" else world, process_sets=sets, backend=backend)
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert hvd.global_process_set.mpi_comm is (None if form == "list" else world)
    assert given.mpi_comm is parity
    if size == 3:
        check(given, [1, 2, 1][rank], [[0, 2], [1], [0, 2]][rank])
        added = hvd.add_process_set(hvd.ProcessSet(world.Split(color=rank // 2)))
        check(added, [3, 3, 4][rank], [[0, 1], [0, 1], [2]][rank])
        assert hvd.remove_process_set(given)
        assert given.process_set_id is None
        assert sorted(current().process_sets) == sorted(current().channels) == [0, 3, 4]
        again = hvd.add_process_set(hvd.ProcessSet(world.Split(color=rank % 2)))
        check(again, [5, 6, 5][rank], [[0, 2], [1], [0, 2]][rank])
    elif size == 2:
        check(given, rank + 1, [rank])
        try:
            hvd.add_process_set(hvd.ProcessSet(launched))
        except ValueError as error:
            assert "1 of its 3 processes are in another one" in str(error), error
        else:
            raise AssertionError
    hvd.shutdown()


for kind, form in (text.split("-") for text in sys.argv[2:]):
    {"members": join_members, "sets": register_process_sets}[kind](form)
