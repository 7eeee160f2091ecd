"""A rank of a world in which rank 1 kills itself, while the others wait for it in an allreduce of a large tensor.

    python -m tests.helpers.killed_rank STORE RANK SIZE LENGTH

STORE: a file that does not exist. LENGTH: of the tensor. The other ranks exit with the error of the allreduce.
"""

from __future__ import annotations

import os
import signal
import sys

import torch

import dualdist as hvd


def main(store: str, rank: int, size: int, length: int) -> None:
    hvd.init(init_method=f"file://{store}", rank=rank, world_size=size)
    large = torch.ones(length)
    hvd.allreduce(large)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        hvd.allreduce(large)
    except hvd.HorovodInternalError as error:
        sys.exit(f"raised {error}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
