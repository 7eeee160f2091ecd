"""A script for mpirun -np 3: process sets of communicators that differ between ranks. See test_part_of_world.py."""

from __future__ import annotations

import sys

import torch
from mpi4py import MPI

import dualdist as hvd
from dualdist.world.context import current

backend, form = sys.argv[1:]
launched = MPI.COMM_WORLD
number = launched.Get_rank()
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


def check(process_set: hvd.ProcessSet, set_id: int, ranks: list[int]) -> None:
    assert (process_set.process_set_id, process_set.ranks) == (set_id, ranks)
    assert process_set.included()
    total = hvd.allreduce(torch.tensor([1.0 + rank]), op=hvd.Sum, process_set=process_set).item()
    assert total == sum(1.0 + member for member in ranks), total


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
