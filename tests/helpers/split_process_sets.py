"""A script for mpirun -np 3: process sets of communicators that differ between ranks. See test_part_of_world.py."""

from __future__ import annotations

import sys

import torch
from mpi4py import MPI

import dualdist as hvd

world = MPI.COMM_WORLD
rank = world.Get_rank()
parity = world.Split(color=rank % 2, key=-rank)
given = hvd.ProcessSet(parity)
hvd.init(comm=world, process_sets=[given], backend=sys.argv[1])
assert hvd.global_process_set.mpi_comm is world
assert given.mpi_comm is parity
added = hvd.add_process_set(world.Split(color=rank // 2))
assert (given.process_set_id, added.process_set_id) == ([1, 2, 1][rank], [3, 3, 4][rank])
assert (given.ranks, added.ranks) == ([[0, 2], [1], [0, 2]][rank], [[0, 1], [0, 1], [2]][rank])
for process_set in (given, added):
    total = hvd.allreduce(torch.tensor([1.0 + rank]), op=hvd.Sum, process_set=process_set).item()
    assert total == sum(1.0 + member for member in process_set.ranks or []), total
