"""Worlds for tests: processes that a real launcher starts once, and that then run one test after the other.

A launch takes seconds, a call to processes that are up a millisecond. Between tests the processes wait in a read from
a socket. A world that fails a test is ended, with every rank's stack in the report; the next test starts it again.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pickle
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar, cast

from ..accelerator import missing
from .forks import BIN, forked
from .requirements import need, need_modules
from .world_worker import ADDRESS, DEVICE, KEY, STACKS

ROOT = Path(__file__).parents[2]
START_SECONDS = RUN_SECONDS = END_SECONDS = 240.0
"""They end a hang and nothing else: the longest test takes 20 s, and a busy machine has taken three times as long."""

OTHERS_SECONDS = 5.0
"""How long the other ranks get once one has failed: they may be waiting for it."""

_OPTIONS = "--allow-run-as-root --oversubscribe --bind-to none --mca btl tcp,self --mca btl_tcp_if_include lo"
MPIRUN = ("mpirun", *_OPTIONS.split(), "-np", "{size}")
"""Over TCP: in shared memory Open MPI waits by spinning, which takes seconds with fewer cores than threads."""

TORCHRUN = (f"{BIN}/torchrun", "--standalone", "--nproc-per-node", "{size}", "--no-python")

_GLOO_GREETING = re.compile(
    r"\A(\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of connected peer ranks is : |\d|\n)+\Z"
)
"""What Gloo prints for each group in torch 2.7 to 2.9. Nobody can turn it off."""
_CLOSED_TWICE = re.compile(
    r"Exception ignored in: <torch\.distributed\.checkpoint\.filesystem\..*NoCloseWriter object at .*>\n"
    r"Traceback .*\n  File .*, in close\n.*\n(?: +\^+\n)?ValueError: flush of closed file\n"
)
"""What Python 3.13 prints when torch's writer of checkpoints is deleted after the disk was full."""
SEMAPHORES_DELETED = re.compile(
    r"(?m)^.*/resource_tracker\.py:\d+: UserWarning: resource_tracker: There appear to be \d+ leaked semaphore.*\n"
    r" +warnings\.warn\(.*\n"
    r"(?:.*/resource_tracker\.py:\d+: UserWarning: resource_tracker: '.*': \[Errno 2\].*\n +warnings\.warn\(.*\n)+"
)
"""What Python prints if horovodrun ends between the two steps in which one of its threads deletes a semaphore. Without
`^`, it would be looked for at each place of a line, which takes minutes in one of 3 MB."""
_HARMLESS = (_CLOSED_TWICE, SEMAPHORES_DELETED, _GLOO_GREETING)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class WorldKind:
    """A launcher with the backend and transport to use. `{size}` in the command is the number of ranks."""

    name: str
    launcher: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    sizes: tuple[int, ...] = (2, 3)
    modules: tuple[str, ...] = ()
    """The Python modules that it needs."""


WORLD_KINDS = (
    WorldKind("local", (), sizes=(1,)),
    WorldKind("torch-gloo", TORCHRUN),
    WorldKind(
        "torch-mpi",
        MPIRUN,
        MappingProxyType({"DUALDIST_BACKEND": "torch", "DUALDIST_TRANSPORT": "mpi"}),
        modules=("mpi4py",),
    ),
    WorldKind("npu-hccl", TORCHRUN, MappingProxyType({DEVICE: "default"})),
    WorldKind("npu-gloo", TORCHRUN, MappingProxyType({DEVICE: "default", "DUALDIST_TRANSPORT": "gloo"})),
    WorldKind("horovod-gloo", (f"{BIN}/horovodrun", "--gloo", "-np", "{size}"), modules=("horovod",)),
    WorldKind("horovod-mpi", MPIRUN, MappingProxyType({"DUALDIST_BACKEND": "horovod"}), modules=("horovod", "mpi4py")),
)

WORLDS = {f"{kind.name}-{size}": (kind, size) for kind in WORLD_KINDS for size in kind.sizes}
"""The worlds of the fixture `world`, by name: kind and number of ranks."""


class WorldFailure(AssertionError):
    """A rank failed or did not answer; the message has the report of every rank."""


class World:
    """`size` processes of one kind. The first `run` starts them, `close` ends them."""

    def __init__(self, kind: WorldKind, size: int, environment: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self.size = size
        self._environment = environment or {}
        self._launcher: subprocess.Popen[bytes] | None = None
        self._ranks: list[Connection[Any, Any]] = []
        self._pids: list[int] = []

    def __str__(self) -> str:
        return f"{self.kind.name}-{self.size}"

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Run a function of a module on every rank and return the results in rank order.

        Raises WorldFailure if it raises on any rank, or takes longer than RUN_SECONDS.
        """
        __tracebackhide__ = True
        if self._launcher is None:
            self._start()
        task = pickle.dumps((function, args, kwargs))
        for rank in self._ranks:
            rank.send_bytes(task)
        answers = self._answers()
        if all(good for good, _ in answers.values()) and len(answers) == self.size:
            return [pickle.loads(answers[rank][1]) for rank in range(self.size)]
        report = self.kill()
        problems = [f"rank {rank} raised\n{text}" for rank, (good, text) in sorted(answers.items()) if not good]
        silent = sorted(set(range(self.size)) - answers.keys())
        if silent:
            problems += [f"ranks {silent} did not answer", report]
        raise WorldFailure("\n".join([f"{self}:", *problems]))

    def _answers(self) -> dict[int, tuple[bool, Any]]:
        """Return the answer of each rank that answered in time."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + RUN_SECONDS
        waiting = set(self._ranks)
        while waiting:
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in self._ranks:
                if connection not in ready:
                    continue
                waiting.discard(connection)
                with contextlib.suppress(EOFError, OSError):  # the rank has died
                    answers[self._ranks.index(connection)] = connection.recv()
            if not all(good for good, _ in answers.values()) or len(answers) + len(waiting) < self.size:
                deadline = min(deadline, time.monotonic() + OTHERS_SECONDS)
        return answers

    def _start(self) -> None:
        need_modules(*self.kind.modules)
        if DEVICE in self.kind.environment:
            reason = missing()
            need(reason is None, str(reason))
        self._folder = tempfile.TemporaryDirectory(prefix="dualdist-test-")
        key = secrets.token_hex(16)
        with (
            Listener(("127.0.0.1", 0), backlog=self.size, authkey=key.encode()) as listener,
            open(self._path("output"), "wb") as output,
        ):
            host, port = listener.address
            command = [part.format(size=self.size) for part in self.kind.launcher]
            self._launcher = subprocess.Popen(
                forked([*command, sys.executable, "-m", "tests.helpers.world_worker"]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=self._clean_environment() | {ADDRESS: f"{host}:{port}", KEY: key, STACKS: self._folder.name},
            )
            self._meet(listener)

    def _clean_environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DUALDIST_", "HOROVOD_"))}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        return kept | {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONPATH": path,
            # Otherwise Horovod keeps warning of calls that a test has left pending.
            "HOROVOD_STALL_CHECK_DISABLE": "1",
            # In each cycle (ms; by default 1) the ranks exchange messages, also while no test runs. On a busy machine
            # that takes half of a core.
            "HOROVOD_CYCLE_TIME": "4",
            "HOROVOD_CACHE_CAPACITY": "4096",  # names; with more than 1024, Horovod warns
            "KINETO_LOG_LEVEL": "99",  # otherwise torch's profiler prints when it starts and stops
            "DUALDIST_STALL_WARN_SECONDS": "60",
            "DUALDIST_SLOW_WARN_SHARE": "1",  # in many tests one rank is late
            "DUALDIST_COMPARE_START": "0",  # many tests start with other numbers on each rank
            "DUALDIST_STALL_TIMEOUT_SECONDS": "600",
            **self.kind.environment,
            **self._environment,
        }

    def _meet(self, listener: Listener) -> None:
        """Wait for every rank to connect and to join the world."""
        deadline = time.monotonic() + START_SECONDS
        connections: list[Connection[Any, Any]] = []
        ranks: dict[int, Connection[Any, Any]] = {}
        server: Any = listener._listener._socket  # type: ignore[attr-defined]
        try:
            while len(ranks) < self.size:
                ready = wait([server, *connections], max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"{self} did not start within {START_SECONDS:.0f} s")
                for source in ready:
                    if source is server:
                        connections.append(listener.accept())
                        self._pids.append(connections[-1].recv())
                    else:
                        connection = cast("Connection[Any, Any]", source)
                        ranks[connection.recv()] = connection
                        connections.remove(connection)
        except (EOFError, OSError, TimeoutError) as error:
            raise WorldFailure(f"{self} did not start: {error!r}\n{self.kill()}") from error
        self._ranks = [ranks[rank] for rank in range(self.size)]

    def close(self) -> None:
        """Let every rank leave. Raises WorldFailure unless all of them exit with 0 and print nothing."""
        if self._launcher is None:
            return
        for rank in self._ranks:
            rank.close()
        try:
            code = self._launcher.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            code = -1
        output = self._path("output").read_text()  # lines of several ranks may be mixed
        for pattern in _HARMLESS:
            output = pattern.sub("", output)
        report = self.kill()
        if code != 0 or output:
            raise WorldFailure(f"{self} must end with code 0 and no output, but ended with {code}.\n{report}")

    def kill(self) -> str:
        """End every process; return the stacks of each and what was printed."""
        launcher, self._launcher = self._launcher, None
        if launcher is None:
            return ""
        _end(self._pids)
        for number in (0, signal.SIGTERM, signal.SIGKILL):  # 0: it ends by itself after its processes
            launcher.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(END_SECONDS)
                break
        parts = [f"stacks of process {pid}:\n{self._stacks(pid)}" for pid in self._pids]
        parts.append(f"output:\n{self.output()}")
        for connection in self._ranks:
            connection.close()
        self._ranks, self._pids = [], []
        self._folder.cleanup()
        return "\n".join(parts)

    def output(self) -> str:
        """Return what the processes have printed so far."""
        return _read(self._path("output"))

    def _stacks(self, pid: int) -> str:
        text = _read(self._path(str(pid)))
        return "\n".join(line for line in text.splitlines() if not line.startswith("Extension modules"))

    def _path(self, name: str) -> Path:
        return Path(self._folder.name) / name


def _end(pids: list[int]) -> None:
    """End processes that are not our children. SIGABRT makes them write their stacks first."""
    with contextlib.ExitStack() as stack:
        alive = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                stack.callback(os.close, handle)
                alive.append(handle)
        for number in (signal.SIGABRT, signal.SIGKILL):
            for handle in alive:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, number)
            deadline = time.monotonic() + END_SECONDS
            for handle in alive:
                select.select([handle], [], [], max(0.0, deadline - time.monotonic()))


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def everywhere(function: Callable[P, None]) -> Callable[..., None]:
    """Make a test whose body runs on every rank of the fixture `world`; its parameters are those of `function`."""

    @functools.wraps(function)
    def test(world: World, **arguments: Any) -> None:
        __tracebackhide__ = True
        world.run(test, **arguments)

    given = inspect.signature(function)
    own = inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY)
    test.on_rank = function  # type: ignore[attr-defined]
    test.__signature__ = given.replace(parameters=[*given.parameters.values(), own])  # type: ignore[attr-defined]
    return test


@contextlib.contextmanager
def started(kind: WorldKind, size: int, environment: Mapping[str, str] | None = None) -> Iterator[World]:
    """A world for one test, with its own environment. How it ends is not checked."""
    world = World(kind, size, environment)
    try:
        yield world
    finally:
        world.kill()
