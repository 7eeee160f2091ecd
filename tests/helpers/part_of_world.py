"""A script for mpirun -np 3: joins worlds of some of the ranks. See test_part_of_world.py."""

from __future__ import annotations

import sys
from typing import Any

import torch
from mpi4py import MPI

import dualdist as hvd

backend, form = sys.argv[1:3]
world = MPI.COMM_WORLD
rank = world.Get_rank()
members = {0: [2, 0], 1: [1], 2: [2, 0]}[rank]
if form == "split":
    comm: Any = world.Split(color=rank % 2, key=-rank)
elif form == "all":
    comm, members = world, [0, 1, 2]
elif form == "reversed":
    comm, members = world.Split(color=0, key=-rank), [2, 1, 0]
else:
    comm = members
for _ in range(2):
    hvd.init(comm, ([0] for _ in range(len(members) > 1)), backend=backend)  # type: ignore[arg-type]
    assert hvd.backend_name() == backend
    total = hvd.allreduce(torch.tensor([1.0 + rank]), op=hvd.Sum).item()
    sent = hvd.broadcast_object(rank, root_rank=0)
    numbers = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
    hvd.shutdown()
place = members.index(rank)
assert numbers == (place, len(members), place, len(members)), numbers
assert total == sum(1.0 + other for other in members), total
assert sent == members[0], sent
