"""Measures one call: dualdist, raw torch.distributed on gloo, and real Horovod, in turns in one run.

    horovodrun --gloo -np 2 python benchmarks/latency.py
    horovodrun --gloo -np 2 python benchmarks/latency.py --backend horovod
    mpirun -np 2 python benchmarks/latency.py --transport mpi

Times are medians over the calls of rank 0. Ratios compare calls of the same run. Needs real Horovod and a launcher that
Horovod supports, because all three run in the same processes.
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
from collections.abc import Callable

import horovod.torch as horovod
import torch
import torch.distributed as dist

import dualdist as hvd

SIZES = {"1 KB": 1 << 10, "64 KB": 1 << 16, "1 MB": 1 << 20, "16 MB": 1 << 24}
LATE_SECONDS = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what one call costs.")
    parser.add_argument("--backend", choices=("torch", "horovod"), default="torch")
    parser.add_argument("--transport", help="such as gloo or mpi")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each (%(default)s)")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init(backend=settings.backend, transport=settings.transport)
    horovod.init()
    if horovod.size() != hvd.size():
        raise SystemExit(
            f"Horovod connects {horovod.size()} of {hvd.size()} processes: use horovodrun or mpirun."
        )
    gloo = start_gloo()
    if hvd.rank() == 0:
        print(f"dualdist on {hvd.backend_name()} ({hvd.transport_name()}), {hvd.size()} processes")
        print(" allreduce   gloo ms  Horovod ms  dualdist ms  / gloo  / Horovod")
    for name, num_bytes in SIZES.items():
        compare(name, num_bytes, gloo, settings.rounds)
    late = late_async_call()
    if hvd.rank() == 0:
        print(
            f"allreduce_async while the others are {LATE_SECONDS:g} s late: returns after {late * 1e3:.3f} ms"
        )
        for function in (hvd.rank, hvd.size):
            print(f"{function.__name__}(): {timeit.timeit(function, number=10_000) * 100:.2f} us")
    hvd.shutdown()


def start_gloo() -> dist.ProcessGroup:
    """Return a gloo group of all ranks, beside any groups that exist already."""
    if dist.is_initialized():
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        return group
    store = None
    if hvd.rank() == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = hvd.broadcast_object(store and store.port)
    store = store or dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def compare(name: str, num_bytes: int, gloo: dist.ProcessGroup, rounds: int) -> None:
    """Print a row: the same in-place sum with each of the three."""
    tensor = torch.zeros(num_bytes // 4)
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(tensor, group=gloo),
        lambda: horovod.allreduce_(tensor, name="it", op=horovod.Sum),
        lambda: hvd.allreduce_(tensor, name="it", op=hvd.Sum),
    ]
    turn = 50 if num_bytes <= 1 << 16 else 3
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
