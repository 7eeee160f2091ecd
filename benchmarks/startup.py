"""Measures how long ranks take to join a world: `dualdist.init()` and torch's own `init_process_group`, in turns.

    python benchmarks/startup.py --processes 64
    torchrun --nproc-per-node 8 benchmarks/startup.py

Each start is in new processes, which are forked from one that has imported torch and dualdist but has run nothing: 64
imports of torch take minutes of CPU time, and are no part of a start. The import of the backend's modules is part of
it, from bytecode as in an installed package: with PYTHONDONTWRITEBYTECODE each rank would compile them. Without a
launcher, this program serves the store and sets the variables, as torchrun does. Both contestants are started in the
same way, on gloo, and end with a barrier. All ranks of a start begin together. Times are in milliseconds: of the median
rank and of the slowest one, and the CPU time (user and system, all threads) of the median rank and of all ranks
together; the process that serves the store is not counted. A ratio is the median over the rounds. Each start is printed
when it ends, and `--json` then has all figures until then.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from report_file import write_report

import dualdist as hvd

HOST = "127.0.0.1"
FIGURES = ("median", "slowest", "CPU", "CPU of all", "descriptors")


def start_torch() -> None:
    dist.init_process_group("gloo")
    dist.barrier()


def start_dualdist() -> None:
    hvd.init(backend="torch", transport="gloo")
    hvd.barrier()


CONTESTANTS: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
    "torch": (start_torch, dist.destroy_process_group),
    "dualdist": (start_dualdist, hvd.shutdown),
}
"""name -> (joins the world, leaves it)"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how long a start takes.")
    parser.add_argument("--processes", type=int, default=8, help="without a launcher (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each contestant (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures after each start")
    settings = parser.parse_args()
    launched = "RANK" in os.environ
    size = int(os.environ["WORLD_SIZE"]) if launched else settings.processes
    own_ranks = [int(os.environ["RANK"])] if launched else list(range(size))
    ports: Any = dist.HashStore()
    if launched:
        ports = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    with tempfile.TemporaryDirectory() as folder:
        cache_bytecode(folder)
        starts = measure_starts(settings.rounds, own_ranks, size, ports, settings.json)
    if 0 in own_ranks:
        show(starts, size)


def cache_bytecode(folder: str) -> None:
    """Write the bytecode of the modules that a start imports to `folder`, and let later processes use it."""
    sys.dont_write_bytecode, sys.pycache_prefix = False, folder
    process = os.fork()
    if process == 0:
        importlib.import_module("dualdist.core.backends.torch")
        os._exit(0)
    os.waitpid(process, 0)


def measure_starts(
    rounds: int, own_ranks: Sequence[int], size: int, ports: Any, file: Path | None
) -> dict[str, list[list[float]]]:
    """Return the summaries of `rounds` starts of each contestant, in rank 0's process.

    There, print each summary, and write all of them to `file`, when a start ends.
    """
    order = random.Random(0)
    starts: dict[str, list[list[float]]] = {name: [] for name in CONTESTANTS}
    for number in range(rounds):
        for name in order.sample(list(CONTESTANTS), len(CONTESTANTS)):
            measured = start(f"{number}/{name}", name, own_ranks, size, ports)
            if measured is None:
                continue
            starts[name].append(summary(measured))
            found = zip(FIGURES, starts[name][-1], strict=True)
            text = ", ".join(f"{figure} {value:.1f}" for figure, value in found)
            print(f"round {number + 1} of {rounds}: {name}: {text}", flush=True)
            if file is not None:
                write_report(file, {"processes": size, "figures": FIGURES, "starts": starts})
    return starts


def serve_store() -> tuple[int, int]:
    """Serve a store in a process of its own, as torchrun's agent does. Return its port, and what to close to end it."""
    port_read, port_write = os.pipe()
    end_read, end_write = os.pipe()
    if os.fork() == 0:
        os.close(end_write)
        store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        os.write(port_write, str(store.port).encode())
        os.read(end_read, 1)
        os._exit(0)
    port = int(os.read(port_read, 16))
    for descriptor in (port_read, port_write, end_read):
        os.close(descriptor)
    return port, end_write


def start(key: str, name: str, own_ranks: Sequence[int], size: int, ports: Any) -> list[list[float]] | None:
    """Start a world in new processes, one for each of `own_ranks`. Return what they measured, if rank 0 is here.

    Each start has a store of its own, as torchrun's worlds have. ports: a store for its port.
    """
    if 0 in own_ranks:
        port, end = serve_store()
        ports.set(key, str(port))
    port = int(ports.get(key))
    result_read, result_write = os.pipe()
    processes = []
    for rank in own_ranks:
        process = os.fork()
        if process == 0:
            code = 1
            try:
                os.environ.update(variables(port, rank, size))
                found = measure(key, name, rank, size)
                if rank == 0:
                    os.write(result_write, json.dumps(found).encode())
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        processes.append(process)
    os.close(result_write)
    with os.fdopen(result_read) as reader:
        text = reader.read()
    for process in processes:
        if os.waitpid(process, 0)[1] != 0:
            raise SystemExit(f"A rank failed in start {key}.")
    if 0 in own_ranks:
        os.close(end)
        os.wait()
    return json.loads(text) if text else None


def variables(port: int, rank: int, size: int) -> Mapping[str, str]:
    """Return the variables that torchrun sets."""
    own = {"MASTER_ADDR": HOST, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    if "RANK" in os.environ:
        return own
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    node = {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_RUN_ID": "none"}
    return own | {name: str(value) for name, value in (ranks | node).items()}


def measure(key: str, name: str, rank: int, size: int) -> list[list[float]]:
    """Join a world, and return [wall, CPU seconds, open descriptors] of each rank on rank 0. Collective."""
    join, leave = CONTESTANTS[name]
    store: Any = dist.TCPStore(HOST, int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"benchmark/{key}", store)
    meet(store, "begin", size)
    wall, cpu = time.perf_counter(), time.process_time()
    join()
    measured = [time.perf_counter() - wall, time.process_time() - cpu, len(os.listdir("/proc/self/fd"))]
    store.set(f"measured/{rank}", json.dumps(measured))
    meet(store, "end", size)
    leave()
    return [json.loads(store.get(f"measured/{other}")) for other in range(size)] if rank == 0 else []


def meet(store: Any, key: str, size: int) -> None:
    if store.add(f"{key}/arrived", 1) == size:
        store.set(f"{key}/all", "")
    store.wait([f"{key}/all"])


def summary(measured: Sequence[Sequence[float]]) -> list[float]:
    """Return FIGURES of one start."""
    walls, cpus, descriptors = zip(*measured, strict=True)
    times = (statistics.median(walls), max(walls), statistics.median(cpus), sum(cpus))
    return [*(1e3 * seconds for seconds in times), max(descriptors)]


def show(starts: Mapping[str, Sequence[Sequence[float]]], size: int) -> None:
    print(f"{size} processes, {len(starts['torch'])} starts each")
    print(" " * 10, *(f"{figure:>12}" for figure in FIGURES))
    for name, found in starts.items():
        print(f"{name:10}", *(f"{statistics.median(column):12.1f}" for column in zip(*found, strict=True)))
    ratios = [
        [ours / theirs for ours, theirs in zip(*pair, strict=True)]
        for pair in zip(starts["dualdist"], starts["torch"], strict=True)
    ]
    print(f"{'ratio':10}", *(f"{statistics.median(column):12.2f}" for column in zip(*ratios, strict=True)))


if __name__ == "__main__":
    main()
