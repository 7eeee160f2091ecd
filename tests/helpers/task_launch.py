"""The side of pytest of tests.helpers.task_worker: start a launch, send it tasks in turn, end it."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from types import MappingProxyType
from typing import Any

from .forks import fork_variables, forked
from .namespace_hosts import Network
from .script_launch import MARK, abort, popen
from .task_worker import TASK_SECONDS, Task
from .world import ROOT

START_SECONDS, END_SECONDS = 150.0, 60.0

Report = dict[str, Any]
"""What one process reports of a task: its numbers, perhaps an error, and its exit code as 'ended'."""

WORKER = ("-m", "tests.helpers.task_worker", "{address}", "{key}")
"""The arguments of Python that a launcher starts."""
PROGRAM = (sys.executable, *WORKER)

NUMBERS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
TWO_AND_ONE = [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 1), (2, 3, 0, 1, 1, 2)]
"""The numbers of every rank of three on two nodes."""


@dataclass(frozen=True)
class Start:
    """How to start `size` processes of WORKER: by one command, or by several at once."""

    commands: tuple[tuple[str, ...], ...]
    size: int = 2
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    forks: bool = True
    """False: new interpreters, not forks of one that has other libraries."""


@dataclass(frozen=True)
class Outcome:
    """The result of a launch."""

    reports: Sequence[list[Report]]
    """For each task the reports of all processes, ordered by rank."""
    codes: Sequence[int]
    """The exit codes of the commands."""
    output: str


def run_tasks(start: Start, tasks: Sequence[Task], network: Network | None = None) -> Outcome:
    """Start the processes, run `tasks` in turn, and end them.

    When all processes train, the links of `network` are cut until they have ended. Raises AssertionError with the
    output if a process does not connect, or a command does not end.
    """
    key, mark = secrets.token_hex(16), secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tasks-"))
        output = stack.enter_context(open(f"{folder}/output", "w+b"))
        listener = stack.enter_context(Listener(f"{folder}/socket", backlog=start.size, authkey=key.encode()))
        launchers = [
            popen(
                forked(command) if start.forks else command,
                (fork_variables() if start.forks else {}) | {"PYTHONPATH": str(ROOT), **start.environment, MARK: mark},
                output,
            )
            for parts in start.commands
            for command in [[part.format(address=listener.address, key=key) for part in parts]]
        ]
        for launcher in launchers:
            stack.callback(abort, mark, launcher)
        reports, problem = [], ""
        try:
            with _met(listener, launchers, start.size) as processes:
                for task in tasks:
                    reports.append(_do(processes, task, network))
            deadline = time.monotonic() + END_SECONDS
            codes = [launcher.wait(max(0.0, deadline - time.monotonic())) for launcher in launchers]
        except (AssertionError, subprocess.TimeoutExpired) as error:
            problem = str(error)
            for launcher in launchers:
                abort(mark, launcher)
        output.seek(0)
        text = output.read().decode(errors="replace")[-20_000:]
        assert not problem, f"{problem}\n{text}"
        return Outcome(reports, codes, text)


Launches = dict[tuple[str, str], tuple[Future[Outcome], int]]
"""For every launcher and what it tries: the outcome of the launch, and the number of its task there."""


def reports_of(launches: Launches, case: tuple[str, str]) -> tuple[list[Report], str]:
    """Return what every process reports of a case, and the output of the launch, which must exit with 0."""
    future, place = launches[case]
    outcome = future.result()
    assert not any(outcome.codes), outcome.output
    return outcome.reports[place], outcome.output


def check_joined(ranks: Sequence[Report], backend: str, output: str, *, nodes: int = 1) -> None:
    """Raise AssertionError unless every rank has joined the right world, on the right backend, and left it.

    nodes: 1, or 2 for two processes and one.
    """
    size = len(ranks)
    world = TWO_AND_ONE if nodes == 2 else [(rank, size, rank, size, 0, 1) for rank in range(size)]
    assert [tuple(one.get(name) for name in NUMBERS) for one in ranks] == world, f"{ranks}\n{output}"
    for one in ranks:
        assert (one["runs"], one["sum"], one["ended"]) == (backend, int("1" * size), 0), output


@contextlib.contextmanager
def _met(
    listener: Listener, launchers: Sequence[subprocess.Popen[bytes]], size: int
) -> Iterator[list[Connection[Any, Any]]]:
    """The connections of all processes, which end when these are closed."""
    server: Any = listener._listener._socket  # type: ignore[attr-defined]
    deadline = time.monotonic() + START_SECONDS
    with contextlib.ExitStack() as stack:
        ended = [os.pidfd_open(launcher.pid) for launcher in launchers]
        for handle in ended:
            stack.callback(os.close, handle)
        connections: list[Connection[Any, Any]] = []
        while len(connections) < size:
            ready = wait([server, *ended], max(0.0, deadline - time.monotonic()))
            how = "a launcher has ended" if ready else f"no other process connected within {START_SECONDS:.0f} s"
            assert server in ready, f"{size} processes must connect, but {len(connections)} did: {how}."
            connections.append(stack.enter_context(listener.accept()))
        yield connections


def _do(processes: Sequence[Connection[Any, Any]], task: Task, network: Network | None) -> list[Report]:
    for process in processes:
        with contextlib.suppress(OSError):
            process.send(task)
    with contextlib.ExitStack() as stack:
        reports: list[Report] = [_receive(process) for process in processes]
        if task.trains and all("rank" in one for one in reports):
            assert network is not None
            stack.enter_context(network.cut())
        for process, one in zip(processes, reports, strict=True):
            while "ended" not in one:
                one |= _receive(process)
    return sorted(reports, key=lambda one: one.get("rank", -1))


def _receive(process: Connection[Any, Any]) -> Report:
    """Return the next report of a process, which itself ends what takes too long."""
    try:
        report: Report = process.recv() if process.poll(2 * TASK_SECONDS) else {"error": "no answer", "ended": None}
    except (EOFError, OSError):
        report = {"error": "the process is gone", "ended": None}
    return report
