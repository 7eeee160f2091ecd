"""Counts what the start of a world costs its store, rank 0 and the other ranks. A model, fitted to starts that ran.

In a start that runs, each rank is a thread, and a process of its own serves the store, as torchrun's agent does. The
ranks run what they run before and after torch connects them: they find each other in the store, learn their addresses,
watch each other, and make the connections for agreements. What torch itself does is not in the model:
`init_process_group` and the connections of Gloo (benchmarks/startup.py measures whole starts), and its connection to
the store takes no time of rank 0. Neither are the exchanges between the ranks, whose number grows with log2(n).
"""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch.distributed as dist

from dualdist.agreement.connections import Connections
from dualdist.backends import store as store_module
from dualdist.backends.start_step import start_step
from dualdist.backends.start_watch import StartWatch
from dualdist.types import Launch

SECONDS = 300.0
HOST = "127.0.0.1"
MESSAGE = "x" * 60
"""As long as what a rank sends about its host."""
STEPS = ("process group", "groups 0", "numbers")
"""The steps of a start on torch that start_step watches."""
REQUESTS = ("set", "get", "wait", "check", "multi_get", "queue_push", "queue_pop")
"""The methods of c10d's Store that a start calls."""
IMPORTS = (
    "import time; begun = time.perf_counter(); import torch, dualdist; print(time.perf_counter() - begun)"
)

_thread = threading.local()


class Start(NamedTuple):
    """What a start of `size` ranks has cost."""

    size: int
    first: int
    """Requests of rank 0."""
    other: int
    """The most requests of another rank."""
    server: float
    """Seconds of CPU time of the process that serves the store."""
    first_cpu: float
    """Seconds of CPU time of rank 0."""

    def seconds(self, latency: float) -> float:
        """Return how long the start takes if rank 0 and the store never work at the same time."""
        return self.server + self.first_cpu + self.other * latency


class Server:
    """A store in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = self._answer()

    def cpu_seconds(self) -> float:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def serve() -> None:
    """Serve a store, and print its port; then, for each line that arrives, the seconds of CPU time until now."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    for _ in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(used.ru_utime + used.ru_stime, flush=True)


@contextmanager
def counted_requests() -> Iterator[Counter[int]]:
    """Count the requests of each rank to c10d's stores."""
    counts: Counter[int] = Counter()

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            counts[_thread.rank] += 1
            return method(*arguments)

        return call

    methods: dict[str, Any] = {name: counted(getattr(dist.Store, name)) for name in REQUESTS}
    with patch.multiple(dist.Store, **methods):
        yield counts


def run_start(size: int) -> Start:
    """Let `size` ranks start."""
    server = Server()
    given = {"MASTER_ADDR": HOST, "MASTER_PORT": server.port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    cpu: list[float] = [0.0] * size

    def run(rank: int) -> None:
        _thread.rank = rank
        begun = time.thread_time()
        watch_cpu = start_rank(rank, size)
        cpu[rank] = time.thread_time() - begun + watch_cpu

    # Each rank is a process in a real start, and numbers its starts itself.
    generation = patch.object(store_module, "_generation", itertools.repeat(0))
    try:
        with patch.dict(os.environ, given), patch.dict(store_module._stores), generation:
            before = server.cpu_seconds()
            with counted_requests() as counts:
                threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            used = server.cpu_seconds() - before
    finally:
        server.close()
    return Start(size, counts.pop(0), max(counts.values()), used, cpu[0])


def start_rank(rank: int, size: int) -> float:
    """Do what a rank of a start on torch does with the store. Return the seconds of CPU time of its watch."""
    launch = Launch("torchrun", rank, size, init_method="env://")
    store = store_module.open_store(launch, os.environ, SECONDS, MESSAGE).store
    watch = StartWatch(store, rank, size, HOST, SECONDS)
    connections = None
    for name in STEPS:
        start_step(lambda: None, store, name, rank, size, watch)
        connections = connections or Connections(store, "set 0", range(size), rank, HOST, SECONDS)
    assert connections is not None and watch.lost is None
    assert connections.allgather_messages(b"started") == [b"started"] * size
    clock = time.pthread_getcpuclockid(watch._thread.ident or 0)
    watch_cpu = time.clock_gettime(clock)
    watch.close(started=True)
    connections.allgather_messages(b"ended")  # no rank closes its connections before
    connections.close()
    return watch_cpu


def import_seconds() -> float:
    """Return how long the import of torch and dualdist takes: the shortest of three."""
    command = [sys.executable, "-c", IMPORTS]
    return min(float(subprocess.check_output(command, text=True)) for _ in range(3))


def modelled(size: int, starts: Sequence[Start]) -> Start:
    """Return the start of `size` ranks on the lines through `starts`, by least squares."""
    sizes = [start.size for start in starts]

    def at_size(figures: Sequence[float]) -> float:
        return float(np.polyval(np.polyfit(sizes, figures, 1), size))

    return Start(
        size,
        round(at_size([start.first for start in starts])),
        max(start.other for start in starts),
        at_size([start.server for start in starts]),
        at_size([start.first_cpu for start in starts]),
    )


def print_starts(sizes: Sequence[int], driven: Sequence[int], latency: float) -> None:
    """Print the starts of worlds of `driven` ranks, which run, and of `sizes`, which are computed.

    latency: seconds from a request to its answer, besides the CPU time of the store's process.
    """
    imports = import_seconds()

    def show(start: Start, mark: str) -> None:
        seconds = start.seconds(latency)
        print(
            f"{start.size:9}{mark}{start.first:19}{start.other:12}{1e3 * start.server:17.1f}"
            f"{1e3 * start.first_cpu:18.1f}{seconds:9.2f}{imports + seconds:17.2f}",
            flush=True,
        )

    print("The start of a world on torch, without what torch itself does")
    print(
        "    ranks  requests of rank 0  of another  store's CPU, ms  rank 0's CPU, ms  init, s  with imports, s"
    )
    starts = []
    for size in driven:
        starts.append(run_start(size))
        show(starts[-1], " ")
    for size in sizes:
        show(modelled(size, starts), "*")
    first, last = (modelled(size, starts).seconds(latency) for size in (64, 4096))
    print(
        f"4096 ranks over 64: init {last / first:.1f}, with imports {(imports + last) / (imports + first):.1f}"
    )


if __name__ == "__main__":
    serve()
