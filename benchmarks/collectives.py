"""Measures collectives of float32 tensors, from 4 bytes to 256 MB per process, beside gloo, mpi4py and Horovod.

    python benchmarks/collectives.py
    python benchmarks/collectives.py --collectives allreduce --bytes 1024 67108864 --baseline mpi4py

The figures are milliseconds per call, as the slowest process saw it. With --bandwidth also GB/s on the bus: the bytes
that each process must send, divided by the time, as nccl-tests define it (doc/PERFORMANCE.md).
"""

from __future__ import annotations

import argparse
import sys

from callers import CALLERS
from comparison import compare, parser
from rounds import Rounds

_COLLECTIVES = ("allreduce", "broadcast", "allgather", "alltoall", "reducescatter")
_BYTES = [4 * 8**power for power in range(9)] + [1 << 28]


def main() -> None:
    options = parser(__doc__, CALLERS, rounds=5, baseline="gloo")
    options.add_argument("--collectives", nargs="+", choices=_COLLECTIVES, default=list(_COLLECTIVES), metavar="NAME")
    options.add_argument("--bytes", nargs="+", type=int, default=_BYTES, metavar="N", help="of each process's tensor")
    options.add_argument("--bandwidth", action="store_true", help="also print GB/s")
    args = options.parse_args()
    chosen = {name: CALLERS[name] for name in args.contestants}
    arguments = [",".join(args.collectives), ",".join(map(str, args.bytes))]
    figures = [f"{name} {size}" for name in args.collectives for size in args.bytes]
    rounds = compare("collectives_worker.py", chosen, arguments, figures, args)
    if args.bandwidth:
        _print_bandwidths(rounds, args)


def _print_bandwidths(rounds: Rounds, args: argparse.Namespace) -> None:
    for contestant, measured in rounds.figures.items():
        for name in args.collectives:
            for size in args.bytes if measured else ():
                seconds = min(row[f"{name} {size}"] for row in measured) / 1e3
                gigabytes = _bus_bytes(name, size, args.processes) / seconds / 1e9
                sys.stdout.write(f"{contestant}: {name} of {size} bytes: {gigabytes:.3f} GB/s\n")


def _bus_bytes(name: str, size: int, processes: int) -> float:
    """Return how many bytes each process must send at least, where its tensor has `size` bytes."""
    others = processes - 1
    if name == "allreduce":
        return 2 * size * others / processes
    if name == "allgather":
        return size * others
    return size if name == "broadcast" else size * others / processes


if __name__ == "__main__":
    main()
