"""A launch of tests.launchers.cells, as pytest sees it: start it, have it try engines in turn, end it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from types import MappingProxyType
from typing import Any

from ..world import ROOT
from .cells import CELL_SECONDS

__all__ = ("PROGRAM", "WORKER", "Engine", "Start", "Told", "Trial", "try_engines")

START_SECONDS, END_SECONDS = 60.0, 20.0

Engine = tuple[str | None, str | None]
"""(backend, transport), as for dualdist.init."""

Told = dict[str, Any]
"""What one process says of an engine: the numbers of cells.use, or an error."""

WORKER = ("-m", "tests.launchers.cells", "{address}", "{key}")
"""The arguments of Python that a launcher starts."""
PROGRAM = (sys.executable, *WORKER)


@dataclass(frozen=True)
class Start:
    """How to start `size` processes of WORKER."""

    command: tuple[str, ...]
    size: int = 2
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Trial:
    """What came of a launch."""

    told: Mapping[Engine, list[Told]]
    """What every process said, ordered by rank."""
    code: int
    output: str


def try_engines(start: Start, engines: Sequence[Engine], host: str = "127.0.0.1") -> Trial:
    """Start the processes, have them use `engines` in turn, and end them.

    host: the address at which they reach pytest. Raises AssertionError, with all output, when they do not come.
    """
    key = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile())
        listener = stack.enter_context(Listener((host, 0), backlog=start.size, authkey=key.encode()))
        address = "{}:{}".format(*listener.address)
        launcher = subprocess.Popen(
            [part.format(address=address, key=key) for part in start.command], cwd=ROOT,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **start.environment},
        )  # fmt: skip
        stack.callback(_kill, launcher)
        told: dict[Engine, list[Told]] = {}
        problem = ""
        try:
            with _met(listener, launcher, start.size) as processes:
                for engine in engines:
                    told[engine] = _use(processes, engine)
            launcher.wait(END_SECONDS)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            problem = str(error)
            _kill(launcher)
        output.seek(0)
        text = output.read().decode(errors="replace")
        assert not problem, f"{problem}\n{text}"
        return Trial(told, launcher.returncode, text)


@contextlib.contextmanager
def _met(
    listener: Listener, launcher: subprocess.Popen[bytes], size: int
) -> Iterator[list[Connection[Any, Any]]]:
    """The connections of all processes; they end when these are closed."""
    server: Any = listener._listener._socket  # type: ignore[attr-defined]
    deadline = time.monotonic() + START_SECONDS
    with contextlib.ExitStack() as stack:
        ended = os.pidfd_open(launcher.pid)
        stack.callback(os.close, ended)
        connections: list[Connection[Any, Any]] = []
        while len(connections) < size:
            ready = wait([server, ended], max(0.0, deadline - time.monotonic()))
            how = "the launcher has ended" if ready else f"nobody else came within {START_SECONDS:.0f} s"
            assert server in ready, f"{size} processes must come, but {len(connections)} came: {how}."
            connections.append(stack.enter_context(listener.accept()))
        yield connections


def _use(processes: Sequence[Connection[Any, Any]], engine: Engine) -> list[Told]:
    for process in processes:
        with contextlib.suppress(OSError):
            process.send(engine)
    deadline = time.monotonic() + 3 * CELL_SECONDS  # each process ends what takes longer than it should
    told: list[Told] = []
    for process in processes:
        try:
            there = process.poll(max(0.0, deadline - time.monotonic()))
            told.append(process.recv() if there else {"error": "did not answer"})
        except (EOFError, OSError):
            told.append({"error": "the process is gone"})
    return sorted(told, key=lambda one: one.get("rank", -1))


def _kill(launcher: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
