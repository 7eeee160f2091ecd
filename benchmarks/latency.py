"""Measures one call: dualdist, raw torch.distributed on gloo, and real Horovod, in turns in one run.

    horovodrun --gloo -np 2 python benchmarks/latency.py
    horovodrun --gloo -np 2 python benchmarks/latency.py --backend horovod
    mpirun -np 2 python benchmarks/latency.py --transport mpi

Times are medians over the calls of rank 0. Ratios compare calls of the same run. Needs real Horovod and a launcher that
Horovod supports, because all three run in the same processes.
"""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable, Sequence

import horovod.torch as horovod
import torch
import torch.distributed as dist
from world import command_line, join_world, start_gloo

import dualdist as hvd

SIZES = {"2 KB": 2 << 10, "64 KB": 1 << 16, "1 MB": 1 << 20, "16 MB": 1 << 24}
LATE_SECONDS = 2.0
Call = Callable[[], object]


def main() -> None:
    settings = join_world(command_line("Measure what one call costs.", rounds=20))
    horovod.init()
    if horovod.size() != hvd.size():
        raise SystemExit(f"Horovod connects {horovod.size()} of {hvd.size()} processes: use horovodrun or mpirun.")
    gloo = start_gloo()
    if hvd.rank() == 0:
        print(f"dualdist on {hvd.backend_name()} ({hvd.transport_name()}), {hvd.size()} processes")
        print("       what   gloo ms  Horovod ms  dualdist ms  / gloo  / Horovod")
    for name, num_bytes in SIZES.items():
        compare(name, sums(num_bytes, gloo), 50 if num_bytes <= 1 << 16 else 3, settings.rounds)
    epoch = {"epoch": 5}
    objects = (
        lambda: dist.broadcast_object_list([epoch], 0, group=gloo),
        lambda: horovod.broadcast_object(epoch, 0, name="it"),
        lambda: hvd.broadcast_object(epoch, 0, name="it"),
    )
    compare("object", objects, 50, settings.rounds)
    barriers = (lambda: dist.barrier(group=gloo), horovod.barrier, hvd.barrier)
    compare("barrier", barriers, 50, settings.rounds)
    late = late_async_call()
    if hvd.rank() == 0:
        print(f"allreduce_async while the others are {LATE_SECONDS:g} s late: returns after {late * 1e3:.3f} ms")
        for function in (hvd.rank, hvd.size):
            print(f"{function.__name__}(): {timeit.timeit(function, number=10_000) * 100:.2f} us")
    hvd.shutdown()


def sums(num_bytes: int, gloo: dist.ProcessGroup) -> tuple[Call, Call, Call]:
    """Return the same in-place sum with each of the three."""
    tensor = torch.zeros(num_bytes // 4)
    return (
        lambda: dist.all_reduce(tensor, group=gloo),
        lambda: horovod.allreduce_(tensor, name="it", op=horovod.Sum),
        lambda: hvd.allreduce_(tensor, name="it", op=hvd.Sum),
    )


def compare(name: str, calls: Sequence[Call], turn: int, rounds: int) -> None:
    """Print a row: the median call of rank 0 with gloo, Horovod and dualdist, which take turns of `turn` calls."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for call, taken in zip(calls, seconds, strict=True):
            hvd.barrier()
            for _ in range(turn):
                began = time.perf_counter()
                call()
                taken.append(time.perf_counter() - began)
    gloo_ms, horovod_ms, ours_ms = (1e3 * statistics.median(taken[turn:]) for taken in seconds)
    if hvd.rank() == 0:
        ratios = f"{ours_ms / gloo_ms:7.2f} {ours_ms / horovod_ms:10.2f}"
        print(f"{name:>10} {gloo_ms:9.3f} {horovod_ms:11.3f} {ours_ms:12.3f} {ratios}")


def late_async_call() -> float:
    """Return how many seconds rank 0 spends in an asynchronous call that the other ranks make late."""
    tensor = torch.zeros(256)
    hvd.barrier()
    if hvd.rank() != 0:
        time.sleep(LATE_SECONDS)
    began = time.perf_counter()
    handle = hvd.allreduce_async(tensor)
    seconds = time.perf_counter() - began
    hvd.synchronize(handle)
    return seconds


if __name__ == "__main__":
    main()
