"""A c10d process group in Python over mpi4py, so that torch.distributed runs over MPI without a rebuilt PyTorch.

    import dualdist.backends.mpi
    torch.distributed.init_process_group("mpi4py")    # under mpirun; rank and size are MPI's

What it guarantees: every collective is a non-blocking one on a communicator of the group's own; a thread moves the
data while Python computes, and ends what is not answered within the group's timeout. What it lacks: tensors that are
not on the CPU.

progress.py has that thread, work.py what a call returns, buffers.py how tensors lie for MPI, steps.py the collectives
as requests of MPI, group.py the process group, joining.py the ways into a world.
"""

from __future__ import annotations

import torch.distributed as dist

from .startup import NAME, create, register_rendezvous, require, start

__all__ = ("NAME", "require", "start")

dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
register_rendezvous()
