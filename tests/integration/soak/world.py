"""Starts the processes of a run, receives their reports, and looks at what they leave."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from ...helpers.forks import fork_variables, forked
from ...helpers.namespace_hosts import Host, Network, running_network
from ...helpers.process_watch import Watched
from ...helpers.script_launch import MARK, started_by
from ...helpers.world import ROOT, WORLD_KINDS
from .faults import CUT, DIRECT, INIT, LINKS, START, Fault
from .hostile import OPEN_MPI_PORTS, Attack

KINDS = {kind.name: kind for kind in WORLD_KINDS}
RUN_SECONDS = 60.0
"""For a run without a fault, on a busy machine."""
END_SECONDS = 40.0
"""For all processes to end after their last report: torchrun gives processes 30 s to end."""
MARKED_SECONDS = 3.0
"""For helper processes, such as Python's resource tracker, to end after the launcher."""
KILLED_AFTER = 1.5
"""Seconds after the start at which all ranks are killed at the latest."""
RATE = "8mbit"
"""Rate of slow links. A step sends about 0.3 MB."""


@dataclass
class Outcome:
    """What happened in a run."""

    struck: float | None = None
    """When the fault happened, on the clock of time.monotonic."""
    reports: dict[int, tuple[str, str, float]] = field(default_factory=dict)
    """Process ID -> kind, text and time of the last report."""
    faulty: int | None = None
    """The ID of the process that the fault happened to."""
    ended: bool = False
    """Whether all other processes have reported or ended in time."""
    left: list[str] = field(default_factory=list)
    """What the run has left behind."""
    codes: list[int] = field(default_factory=list)
    """Exit codes of the processes that the soak itself has started."""
    output: str = ""

    @property
    def others(self) -> dict[int, tuple[str, str, float]]:
        return {pid: report for pid, report in self.reports.items() if pid != self.faulty}


def run_world(fault: Fault, folder: Path, seconds: float) -> Outcome:
    """Run all ranks of a world in `folder`. seconds: how long the ranks may take to report after the fault."""
    outcome, temporary = Outcome(), folder / "t"
    temporary.mkdir(exist_ok=True)
    shared_memory = set(os.listdir("/dev/shm"))
    mark = secrets.token_hex(8)
    with Listener(str(folder / "reports"), "AF_UNIX", backlog=16) as listener, open(folder / "output", "wb") as output:
        processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**environment, MARK: mark},
                start_new_session=True,
            )
            for command, environment in _commands(fault, folder)
        ]
        run = _Run(fault, outcome, seconds)
        try:
            run.receive(listener, processes)
        finally:
            run.release()
            if fault.kind == "all killed":
                _kill_all(processes, run.pids, mark)
                shutil.rmtree(temporary)
                temporary.mkdir()
            _end(outcome, processes, run.pids, mark)
            run.close()
    (folder / "reports").unlink(missing_ok=True)
    outcome.output = (folder / "output").read_text(errors="replace")
    outcome.left += [str(path) for path in temporary.iterdir()]
    made = set(os.listdir("/dev/shm")) - shared_memory
    outcome.left += [name for name in made if any(str(pid) in name for pid in run.pids)]
    return outcome


def _commands(fault: Fault, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Return the command and the environment of each process to start."""
    worker = [sys.executable, "-m", "tests.integration.soak.rank"]
    # Horovod's operations do not notice that another rank has given up, as long as its process lives.
    stalls = "12" if fault.world.startswith("horovod") else "60"
    is_stop, is_start = fault.kind in ("SIGSTOP", CUT), fault.place in (START, INIT)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("DUALDIST_", "HOROVOD_"))},
        **fork_variables(),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder / "t"),
        "DUALDIST_DUMP_DIR": str(folder / "dumps"),  # what a failure writes is not left behind
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "OMPI_MCA_btl_tcp_port_min_v4": str(OPEN_MPI_PORTS.start),
        "OMPI_MCA_btl_tcp_port_range_v4": str(len(OPEN_MPI_PORTS)),
        "DUALDIST_STALL_TIMEOUT_SECONDS": "8" if is_stop else stalls,
        "DUALDIST_START_TIMEOUT_SECONDS": "8" if is_stop or is_start else "60",
        "FAULT": fault.to_json(),
        "REPORTS": str(folder / "reports"),
        "CHECKPOINTS": str(folder / "checkpoints"),
    }
    if fault.world in DIRECT:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        method = (
            f"file://{folder}/meeting-{secrets.token_hex(4)}"
            if fault.method == "file"
            else f"tcp://{'127.0.0.1' if fault.hosts == 1 else host_of(0).address()}:{port}"
        )
        given = {"init_method": method, "world_size": fault.size, "backend": fault.world}
        return [
            (_placed(worker, fault, rank), {**environment, "INIT": json.dumps({**given, "rank": rank})})
            for rank in range(fault.size)
        ]
    if fault.world == "run":
        run = f"-m dualdist run -np {fault.size} --backend torch"
        command = [sys.executable, *run.split(), *worker]
        return [(forked(command), environment)]
    kind = KINDS[fault.world]
    command = [*(part.format(size=fault.size) for part in kind.launcher), *worker]
    return [(forked(command), {**environment, **kind.environment})]


def _placed(worker: list[str], fault: Fault, rank: int) -> list[str]:
    """Return the command that starts a rank of a direct world on its host."""
    return forked(worker) if fault.hosts == 1 else [*host_of(rank).command(*worker)]


@functools.cache
def _network() -> Network:
    """Return the hosts, which stay until the soak ends. Needs root."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(running_network())


def host_of(rank: int) -> Host:
    """Return the host on which a rank runs."""
    hosts = _network().hosts
    return hosts[rank % len(hosts)]


class _LinkFault:
    """A fault of the links, from `strike` to `close`."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._stack = contextlib.ExitStack()

    def strike(self) -> None:
        """Cut the links, or slow them down."""
        network = _network()
        self._stack.enter_context(network.cut() if self._kind == CUT else network.slow(RATE))

    def close(self) -> None:
        """Repair the links."""
        self._stack.close()


class _Run:
    """Receives the reports of one run."""

    def __init__(self, fault: Fault, outcome: Outcome, seconds: float) -> None:
        self._fault = fault
        self._outcome = outcome
        self._seconds = seconds
        self._ranks: dict[Any, int] = {}
        """Connection -> process ID."""
        self._attack = Attack(fault.seed) if fault.kind == "hostile connections" else None
        self._links = _LinkFault(fault.kind) if fault.kind in LINKS else None
        self.pids: set[int] = set()

    def receive(self, listener: Listener, processes: list[subprocess.Popen[bytes]]) -> None:
        """Receive reports until each rank has reported how it ended, or has ended."""
        outcome, fault = self._outcome, self._fault
        server: Any = listener._listener._socket  # type: ignore[attr-defined]
        started = time.monotonic()
        kill_at = started + 2 * fault.seconds / 0.02 * KILLED_AFTER if fault.kind == "all killed" else None
        while True:
            now = time.monotonic()
            deadline = started + RUN_SECONDS if outcome.struck is None else outcome.struck + self._seconds
            if kill_at is not None and now >= kill_at:
                outcome.ended = True  # `_end` kills all
                return
            if self._is_over(processes):
                outcome.ended = True
                return
            if now > deadline:
                return
            until = min(deadline, now + 0.2, kill_at or deadline)
            for ready in wait([server, *self._ranks], max(0.0, until - now)):
                if ready is server:
                    connection = listener.accept()
                    self._ranks[connection] = connection.recv()[1]
                    self.pids.add(self._ranks[connection])
                    if self._attack is not None:
                        self._attack.add(self._ranks[connection])
                else:
                    self._read(ready)

    def _read(self, connection: Any) -> None:
        pid = self._ranks[connection]
        try:
            kind, text = connection.recv()
        except (EOFError, OSError):
            del self._ranks[connection]
            self._outcome.reports.setdefault(pid, ("ended", "", time.monotonic()))
            return
        if kind == "struck":
            self._outcome.struck = time.monotonic()
            if self._links is None:
                self._outcome.faulty = pid
            else:
                self._links.strike()
            return
        self._outcome.reports[pid] = kind, text, time.monotonic()
        if not self._fault.stays and kind == "error":
            self._release(connection)

    def _is_over(self, processes: list[subprocess.Popen[bytes]]) -> bool:
        reports = self._outcome.others
        missing = self._fault.size - (self._outcome.faulty is not None)
        launcher_ended = all(process.poll() is not None for process in processes)
        return len(reports) == missing or (launcher_ended and not self._ranks)

    def release(self) -> None:
        """Let all ranks end."""
        if self._attack is not None:
            self._attack.close()
        for connection in list(self._ranks):
            self._release(connection)
        faulty = self._outcome.faulty
        if self._fault.kind == "SIGSTOP" and faulty is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(faulty, signal.SIGKILL)

    def close(self) -> None:
        """Undo the fault, after all processes have ended."""
        if self._links is not None:
            self._links.close()

    def _release(self, connection: Connection[Any, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):
            connection.send("end")


def _end(outcome: Outcome, processes: list[subprocess.Popen[bytes]], pids: set[int], mark: str) -> None:
    """Wait for all processes to end. Those that do not are left behind, and are ended here."""
    deadline = time.monotonic() + END_SECONDS
    for process in processes:
        try:
            outcome.codes.append(process.wait(max(0.1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            outcome.left.append(f"process {process.pid}, {' '.join(map(str, process.args))[-60:]}")  # type: ignore[arg-type]
            process.kill()
            process.wait()
    outcome.left += [f"rank in process {pid}" for pid in Watched(pids).left(3.0)]
    outcome.left += _kill_marked(mark, MARKED_SECONDS)


def _kill_all(processes: list[subprocess.Popen[bytes]], pids: set[int], mark: str) -> None:
    for process in processes:
        process.kill()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    Watched(started_by(mark)).left(0.0)


def _kill_marked(mark: str, seconds: float) -> list[str]:
    """Kill the processes of this run that do not end within `seconds`, and return how they were started."""
    commands = {}
    for pid in started_by(mark):
        with contextlib.suppress(OSError):
            commands[pid] = f"process {pid}: {Path(f'/proc/{pid}/cmdline').read_bytes()[-80:]!r}"
    return [commands[pid] for pid in Watched(commands).left(seconds)]
