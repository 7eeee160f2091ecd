"""A helper in the style of those that are copied between diffusion models: the processes of mpirun become torch's."""

import os
import socket

import torch as th
import torch.distributed as dist
from mpi4py import MPI


def setup_dist():
    if dist.is_initialized():
        return
    comm = MPI.COMM_WORLD
    backend = "nccl" if th.cuda.is_available() else "gloo"
    address = "localhost" if backend == "gloo" else socket.gethostname()

    # torch reads these
    os.environ["RANK"] = str(comm.rank)
    os.environ["WORLD_SIZE"] = str(comm.size)
    os.environ["MASTER_ADDR"] = comm.bcast(address, root=0)
    os.environ["MASTER_PORT"] = str(comm.bcast(free_port(), root=0))
    dist.init_process_group(backend=backend, init_method="env://")


def free_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def dev():
    return th.device("cuda" if th.cuda.is_available() else "cpu")


def sync_params(params):
    for param in params:
        dist.broadcast(param.data, 0)
