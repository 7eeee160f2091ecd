"""A process group for torch.distributed over mpi4py. It works with a PyTorch that was built without MPI.

    import dualdist.backends.mpi
    torch.distributed.init_process_group("mpi4py")    # under mpirun; rank and size are MPI's

Every collective is non-blocking and uses a communicator that belongs to its process group alone. A progress thread
moves the data while Python computes, and ends collectives that exceed the group's timeout. Only tensors on the CPU are
supported.

group.py has the process group, communicator.py the collectives as MPI requests, buffers.py the preparation of tensors
for MPI, work.py the objects that calls return, progress.py the thread, callbacks.py the threads of callbacks, closed.py
what remains of destroyed groups, and startup.py the start of MPI and the rendezvous through it.
"""

from __future__ import annotations

import torch.distributed as dist

from .startup import NAME, create, register_rendezvous, require, start

__all__ = ("NAME", "create", "require", "start")

dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
# torch 2.15 attaches its flight recorder to groups with devices, which ends the process if the group is in Python.
_not_recorded: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
_not_recorded.add(NAME)
register_rendezvous()
