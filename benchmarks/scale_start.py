"""Counts what the start of a world costs its store, rank 0 and the other ranks. A model, fitted to starts that ran.

Run scale.py. As a script, this file is the process that serves the store, as torchrun's agent does.

In a start that runs, each rank is a thread, and each host has 8. The ranks run what they run before and after torch
connects them: they find each other in the store, learn their addresses, watch each other, and make the connections for
agreements. Not in the model: `init_process_group` and Gloo's connections (benchmarks/startup.py measures whole starts);
the store's wait for the name of each process that connects, which is long without a working name server; and the
exchanges between ranks, whose number grows with log2(n).
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch.distributed as dist

from dualdist.agreement.connections import Connections
from dualdist.backends import store as store_module
from dualdist.backends.start_watch import StartWatch
from dualdist.backends.torch import start_step
from dualdist.meeting import addresses
from dualdist.types import Launch

SECONDS = 300.0
HOST = "127.0.0.1"
MESSAGE = "x" * 60
"""As long as what a rank sends about its host."""
RANKS_PER_HOST = 8
REQUESTS = ("set", "get", "wait", "check", "multi_get", "queue_push", "queue_pop")
"""The methods of c10d's Store that a start calls."""
IMPORTS = (
    "import time; begun = time.perf_counter(); import torch, dualdist; print(time.perf_counter() - begun)"
)
"""With PYTHONDONTWRITEBYTECODE, it compiles dualdist as well: about 0.1 s."""

_thread = threading.local()


class Start(NamedTuple):
    """What a start of `size` ranks has cost."""

    size: int
    rank_0_requests: int
    other_requests: int
    """The most of another rank."""
    server_cpu: float
    """Seconds of the process that serves the store."""
    rank_0_cpu: float
    """Seconds."""

    def seconds(self, latency: float) -> float:
        """Return how long the start takes if rank 0 and the store never work at the same time.

        Each request counts as one answer: c10d sends none to a `set` and two to a `get`.
        """
        requests = max(self.rank_0_requests, self.other_requests)
        return self.server_cpu + self.rank_0_cpu + requests * latency


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

    def run(rank: int) -> float:
        _thread.rank = rank
        begun = time.thread_time()
        watch_cpu = start_rank(rank, size)
        return time.thread_time() - begun + watch_cpu

    server = Server()
    with ExitStack() as stack:
        stack.callback(server.close)
        given = {"MASTER_ADDR": HOST, "MASTER_PORT": server.port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        stack.enter_context(patch.dict(os.environ, given))
        # What each rank has as a process of its own: the stores that it has opened, the number of its start, its host.
        stack.enter_context(patch.dict(store_module._stores))
        stack.enter_context(patch.object(store_module, "_generation", itertools.repeat(0)))
        stack.enter_context(patch.object(addresses, "own_node", own_node))
        stack.enter_context(patch.object(addresses, "candidates", lambda env: [HOST]))
        counts = stack.enter_context(counted_requests())
        before = server.cpu_seconds()
        with ThreadPoolExecutor(size) as pool:
            cpu = list(pool.map(run, range(size)))
        used = server.cpu_seconds() - before
    return Start(size, counts.pop(0), max(counts.values()), used, cpu[0])


def own_node() -> str:
    return f"host {_thread.rank // RANKS_PER_HOST}"


def start_rank(rank: int, size: int) -> float:
    """Do what a rank of a start on torch does with the store. Return the seconds of CPU time of its watch."""
    launch = Launch("torchrun", rank, size, init_method="env://")
    store = store_module.open_store(launch, os.environ, SECONDS, MESSAGE).store
    watch = StartWatch(store, rank, size, HOST, SECONDS)

    def step(name: str) -> None:
        start_step(lambda: None, store, name, rank, size, watch)

    step("process group")
    connections = Connections(store, "set 0", range(size), rank, HOST, SECONDS)
    step("groups 0")
    step("numbers")
    assert watch.lost is None
    assert connections.allgather_messages(b"started") == [b"started"] * size
    assert watch._thread.ident is not None
    watch_cpu = time.clock_gettime(time.pthread_getcpuclockid(watch._thread.ident))
    watch.close(started=True)
    connections.allgather_messages(b"ended")  # no rank closes its connections before
    connections.close()
    return watch_cpu


def import_seconds() -> float:
    """Return how long the import of torch and dualdist takes: the shortest of three."""
    command = [sys.executable, "-c", IMPORTS]
    return min(float(subprocess.check_output(command, text=True)) for _ in range(3))


def modelled(size: int, starts: Sequence[Start]) -> Start:
    """Return the start of `size` ranks, from lines fitted to `starts` by least squares.

    The requests of another rank are the most that a start made: without those while it waits, they do not grow.
    """
    sizes = [start.size for start in starts]

    def at_size(figures: Sequence[float]) -> float:
        return float(np.polyval(np.polyfit(sizes, figures, 1), size))

    return Start(
        size,
        round(at_size([start.rank_0_requests for start in starts])),
        max(start.other_requests for start in starts),
        at_size([start.server_cpu for start in starts]),
        at_size([start.rank_0_cpu for start in starts]),
    )


def print_starts(driven: Sequence[int], larger: Sequence[int], latency: float) -> None:
    """Print the starts of worlds of `driven` ranks, which run, and of `larger` ones, which are computed.

    latency: seconds from a request to its answer, besides the CPU time of the store's process.
    """
    imports = import_seconds()

    def show(start: Start, mark: str) -> None:
        seconds = start.seconds(latency)
        print(
            f"{start.size:9}{mark}{start.rank_0_requests:19}{start.other_requests:12}{1e3 * start.server_cpu:17.1f}"
            f"{1e3 * start.rank_0_cpu:18.1f}{seconds:9.2f}{imports + seconds:17.2f}",
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
    for size in larger:
        show(modelled(size, starts), "*")
    first, last = (modelled(size, starts).seconds(latency) for size in (64, 4096))
    print(
        f"4096 ranks over 64: init {last / first:.1f}, with imports {(imports + last) / (imports + first):.1f}"
    )


if __name__ == "__main__":
    serve()
