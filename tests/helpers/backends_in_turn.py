"""Joins a world on one backend after the other, each in a fork, and prints what each gives. MPI can start only once.

LAUNCHER python -m tests.helpers.backends_in_turn torch+gloo torch+mpi
"""

from __future__ import annotations

import os
import sys

import torch

import dualdist as hvd


def join(backend: str, transport: str | None = None) -> str:
    """Join the world, sum powers of ten, leave it, and return the numbers of this process and the sum."""
    hvd.init(backend=backend, transport=transport)
    total = int(hvd.allreduce(torch.full((300_000,), 10.0 ** hvd.rank()), op=hvd.Sum)[-1])
    joined = f"{hvd.backend_name()}+{hvd.transport_name()}"
    numbers = f"{hvd.rank()} of {hvd.size()}, local {hvd.local_rank()} of {hvd.local_size()}"
    hvd.shutdown()
    return f"{joined}: {numbers}, sum {total}"


def main(names: list[str]) -> int:
    """Join on each backend; return an exit code."""
    for name in names:
        child = os.fork()
        if child == 0:
            # One write, because ranks share the output.
            os.write(1, f"{join(*name.split('+'))}\n".encode())
            return 0
        _, status = os.waitpid(child, 0)
        if status != 0:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
