#!/usr/bin/env python
# -*- coding: utf-8 -*-
"""In the style of scripts for mpirun that set torch's variables by mpi4py."""
from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel as DDP

comm = MPI.COMM_WORLD
rank = comm.Get_rank()
world_size = comm.Get_size()


def setup():
    with socket.socket() as s:
        s.bind(("", 0))
        port = s.getsockname()[1]
    os.environ["MASTER_ADDR"] = comm.bcast("127.0.0.1", root=0)
    os.environ["MASTER_PORT"] = str(comm.bcast(port, root=0))  # of rank 0
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=90))


setup()
torch.manual_seed(7 + dist.get_rank())
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for _ in range(5):
    optimizer.zero_grad()
    loss = (model(torch.randn(6, 4)) - 1).abs().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"<{dist.get_rank()} {losses}>", flush=True)
dist.destroy_process_group()
