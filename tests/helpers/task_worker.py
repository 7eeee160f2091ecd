"""One process of a launch that tries several backends in turn. pytest sends the tasks and receives the reports.

    LAUNCHER python -m tests.helpers.task_worker SOCKET KEY

Importing torch takes most of a launch. So each backend is tried in a fork of a process that has only imported
dualdist: the fork has the environment from the launcher, and no backend has run in it. Only MPI can start just once
per launch.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Client
from typing import Any

TASK_SECONDS = 60.0
"""Seconds in which a backend must work, refuse, or notice that it cannot reach the others."""


@dataclass(frozen=True)
class Task:
    """What a process shall do."""

    backend: str | None
    transport: str | None
    environment: Mapping[str, str] = field(default_factory=dict)
    trains: bool = False
    """Whether to train without end after joining the world."""


def serve(address: str, key: str) -> None:
    """Do each Task from pytest until it closes the connection. Reply with dictionaries; the last one has 'ended'."""
    import dualdist

    assert not dualdist.is_initialized()
    with Client(address, authkey=key.encode()) as connection:
        while True:
            try:
                task = connection.recv()
            except EOFError:
                return
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(reader)
                _do(task, writer)
                sys.exit(0)
            os.close(writer)
            _follow(child, reader, connection.send)


def _do(task: Task, writer: int) -> None:
    """In the fork: use a backend. Write one line of JSON after joining the world, and one if something fails."""
    faulthandler.enable()  # a fork that takes too long gets SIGABRT
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import dualdist

    if not task.trains:
        os.environ.update(task.environment)
    with open(writer, "w", buffering=1) as pipe:
        try:
            report = _join(task)
            steps = _train() if task.trains else iter(())
            next(steps, None)
            if task.trains:
                # Join again with the limits of the task: the first time, a rank may be late by seconds.
                dualdist.shutdown()
                print(file=pipe)  # from here, the next line may take as long again
                os.environ.update(task.environment)
                _join(task)
                steps = _train()
                next(steps)
            print(json.dumps(report), file=pipe)
            for _ in steps:
                pass
            dualdist.shutdown()
        except Exception as error:
            traceback.print_exc()
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=pipe)


def _join(task: Task) -> dict[str, Any]:
    """Join the world; return the numbers of this process, a sum over all ranks, and the addresses of its peers."""
    import psutil
    import torch

    import dualdist

    dualdist.init(backend=task.backend, transport=task.transport)
    total = dualdist.allreduce(torch.full((300_000,), 10.0 ** dualdist.rank()), op=dualdist.Sum)[-1]
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    report = {name: getattr(dualdist, name)() for name in names}
    connections = psutil.Process().net_connections("tcp4")
    peers = sorted({entry.raddr.ip for entry in connections if entry.raddr})
    return report | {
        "runs": f"{dualdist.backend_name()}+{dualdist.transport_name()}",
        "sum": int(total),
        "peers": peers,
    }


def _train() -> Iterator[None]:
    """Train, a step at a time, until something fails."""
    import torch

    import dualdist

    model = torch.nn.Linear(100, 100)
    optimizer = dualdist.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    while True:
        optimizer.zero_grad()
        model(torch.ones(8, 100)).square().mean().backward()
        optimizer.step()
        yield


def _follow(child: int, reader: int, send: Any) -> None:
    """Forward what the fork writes, and its exit code. End the fork if it is silent or runs for too long."""
    with open(reader) as pipe:
        deadline = time.monotonic() + TASK_SECONDS
        while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            line = pipe.readline()
            if not line:
                break
            if line.strip():
                send(json.loads(line))
            deadline = time.monotonic() + TASK_SECONDS
    handle = os.pidfd_open(child)
    if not select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0]:
        os.kill(child, signal.SIGABRT)
        send({"error": f"still ran after {TASK_SECONDS:.0f} s"})
    os.close(handle)
    send({"ended": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])})


def main() -> None:
    words = sys.argv[1:]
    if words[0] == "spawn":
        import dualdist

        dualdist.spawn(serve, args=tuple(words[2:]), nprocs=int(words[1]))
    else:
        serve(words[0], words[1])


if __name__ == "__main__":
    main()
