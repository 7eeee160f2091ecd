"""Starting a script with a real launcher, once, and looking at how it ends."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from .forks import BIN, fork_of, fork_variables, forked
from .requirements import need_modules
from .world import MPIRUN, ROOT, SEMAPHORES_DELETED

SECONDS, END_SECONDS = 200.0, 5.0
STACKS = {"PYTHONFAULTHANDLER": "1"}
"""With it, a Python that is ended by SIGABRT writes the stacks of its threads first."""
SHOWN = 20_000
MARK = "TEST_LAUNCH"
"""The variable by which the processes of a launch are found."""


Script = Callable[[str], str]
"""Writes a text into a file, and returns its path: the fixture `script`."""


@dataclass(frozen=True)
class Launcher:
    """How to start a script, the number of processes, and the Python modules that this needs."""

    command: tuple[str, ...]
    size: int = 2
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    modules: tuple[str, ...] = ()


_MPIRUN = tuple(part.format(size=2) for part in MPIRUN)
_TORCHRUN = (f"{BIN}/torchrun", "--standalone", "--nproc-per-node", "2")

LAUNCHERS = {
    "python": Launcher((sys.executable,), 1),
    "torchrun": Launcher(_TORCHRUN),
    "torchrun-horovod": Launcher(
        _TORCHRUN, environment=MappingProxyType({"DUALDIST_BACKEND": "horovod"}), modules=("horovod",)
    ),
    "horovodrun": Launcher((f"{BIN}/horovodrun", "--gloo", "-np", "2", sys.executable), modules=("horovod",)),
    "mpirun": Launcher((*_MPIRUN, sys.executable), modules=("horovod", "mpi4py")),
    "mpirun-torch": Launcher(
        (*_MPIRUN, sys.executable),
        environment=MappingProxyType({"DUALDIST_BACKEND": "torch", "DUALDIST_TRANSPORT": "gloo"}),
        modules=("mpi4py",),
    ),
}
"""Every launcher with the backend it chooses by default, and with the other one."""


@dataclass(frozen=True)
class Ended:
    """How a launch ended. The output is without SEMAPHORES_DELETED."""

    code: int
    output: str

    def check(self) -> str:
        """Return the output. Raises AssertionError with it unless the exit code is 0."""
        assert self.code == 0, f"exit code {self.code}:\n{self.shown()}"
        return self.output

    def shown(self) -> str:
        """Return what a report shows of the output: the beginning and the end of a long one."""
        middle = f"\n[{len(self.output) - 2 * SHOWN} characters]\n"
        return self.output if len(self.output) < 2 * SHOWN else self.output[:SHOWN] + middle + self.output[-SHOWN:]


def launch(name: str, *arguments: str, environment: Mapping[str, str] | None = None, forks: bool = True) -> Ended:
    """Run a script to its end; see `finish`."""
    launcher = LAUNCHERS[name]
    need_modules(*launcher.modules)
    return finish([*launcher.command, *arguments], {**launcher.environment, **(environment or {})}, forks=forks)


def finish(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    seconds: float = SECONDS,
    forks: bool = True,
    folder: Path = ROOT,
) -> Ended:
    """Run `command` in a folder to its end, and print how it ended, for the report of a test that fails.

    After `seconds`, its Pythons write their stacks, every process is ended, and the launch has failed.
    forks: whether its Pythons may be forks of one that has imported torch, which do not run sitecustomize.
    """
    mark = secrets.token_hex(8)
    added = {**(fork_variables() if forks else {}), **(environment or {}), MARK: mark}
    process = popen(forked(command) if forks else command, added, cwd=folder)
    try:
        written, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        abort(mark, process)
        written, _ = process.communicate()
        output = written.decode(errors="replace")
        raise AssertionError(f"{' '.join(command)} did not end within {seconds:.0f} s:\n{output}") from None
    output = "\n".join(re.split(r"\r\n?|\n", written.decode(errors="replace")))
    ended = Ended(process.returncode, SEMAPHORES_DELETED.sub("", output))
    line = " ".join(command).encode(errors="backslashreplace").decode()  # an argument may be no text
    print(f"{line} ended with exit code {ended.code}:\n{ended.shown()}")
    return ended


def environment() -> dict[str, str]:
    """Return the variables of this process, also while pytest, in another thread, removes one."""
    return {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}


def popen(
    command: Sequence[str], added: Mapping[str, str], output: Any = subprocess.PIPE, cwd: Path = ROOT
) -> subprocess.Popen[bytes]:
    """Start a launcher in a session of its own, with one thread and `added` variables, and all its output in one."""
    files: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
    env = {**environment(), **STACKS, "OMP_NUM_THREADS": "1", **added}
    return subprocess.Popen(command, cwd=cwd, env=env, start_new_session=True, **files)


def abort(mark: str, launcher: subprocess.Popen[Any]) -> None:
    """End every process of a launch. Its Pythons write their stacks first, one that is the launcher last.

    The launcher may forward what the others write.
    """
    first = fork_of(launcher.pid)
    pythons = [pid for pid in started_by(mark) if pid != first and _writes_stacks(pid)]
    for pids in (pythons, [first] if launcher.poll() is None else []):
        _kill(pids, signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(END_SECONDS)
            break
    launcher.kill()
    _kill(started_by(mark), signal.SIGKILL)  # torchrun's processes have sessions of their own
    launcher.wait()


def _kill(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _writes_stacks(pid: int) -> bool:
    """Return whether a process is a Python that reads STACKS. Agents of `dualdist run` do not (-E)."""
    with contextlib.suppress(OSError):
        program, *options = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b"python" in program and b"-E" not in options[:1]
    return False


def started_by(mark: str) -> list[int]:
    """Return the ids of all processes that have the variable MARK with the value `mark`, and of what they started.

    A fork of forks.py takes the place of its client.
    """
    found = set()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if f"{MARK}={mark}".encode() in file.read_bytes().split(b"\0"):
                process = psutil.Process(fork_of(int(file.parent.name)))
                found.add(process.pid)  # first: a child that ends meanwhile must not hide it
                found.update(child.pid for child in process.children(recursive=True))
    return sorted(pid for pid in found if fork_of(pid) == pid)
