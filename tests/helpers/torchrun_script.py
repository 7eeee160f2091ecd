"""A script for torchrun: it adds the ranks, and prints one line.

It uses mpi4py with the argument "mpi", and joins two groups in turn with "dualdist://". Else it knows no dualdist.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

METHOD = "dualdist://"
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
"""What it prints of its environment."""


def main() -> None:
    if "mpi" in sys.argv:
        from mpi4py import MPI

        total = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.Get_rank() + 1)
    else:
        import torch
        import torch.distributed as dist

        methods: list[str | None] = [None]
        if METHOD in sys.argv:
            importlib.import_module("dualdist.exec.rendezvous")
            methods = [METHOD, METHOD]
        for method in methods:
            dist.init_process_group("gloo", method)
            tensor = torch.tensor([dist.get_rank() + 1])
            dist.all_reduce(tensor)
            total = int(tensor)
            dist.destroy_process_group()
    # One write, so that the lines of several processes do not mix.
    line = json.dumps([total, *(int(os.environ[name]) for name in NAMES), sys.argv[1:]])
    os.write(1, f"\n{line}\n".encode())


if __name__ == "__main__":
    main()
