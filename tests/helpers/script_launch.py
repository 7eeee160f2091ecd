"""Starting a script with a real launcher, once, and looking at how it ends."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from .forks import BIN, fork_variables, forked
from .requirements import need_modules
from .world import MPIRUN, ROOT, SEMAPHORES_DELETED

__all__ = ("LAUNCHERS", "MARK", "SECONDS", "Ended", "Launcher", "finish", "launch", "started_by")

SECONDS = 200.0
MARK = "TEST_LAUNCH"
"""The variable by which the processes of a launch are found."""


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


def launch(
    name: str, *arguments: str, environment: Mapping[str, str] | None = None, forks: bool = True
) -> Ended:
    """Run a script to its end; see `finish`."""
    launcher = LAUNCHERS[name]
    need_modules(*launcher.modules)
    return finish(
        [*launcher.command, *arguments], {**launcher.environment, **(environment or {})}, forks=forks
    )


def finish(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    seconds: float = SECONDS,
    forks: bool = True,
) -> Ended:
    """Run `command` to its end. After `seconds`, every process is ended and the launch has failed.

    forks: whether its Pythons may be forks of one that has imported torch, which do not run sitecustomize.
    """
    mark = secrets.token_hex(8)
    process = subprocess.Popen(
        forked(command) if forks else command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            **(fork_variables() if forks else {}),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
            MARK: mark,
        },
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        # torchrun's processes have sessions of their own.
        for pid in started_by(mark):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{' '.join(command)} did not end within {seconds:.0f} s:\n{output}") from None
    return Ended(process.returncode, SEMAPHORES_DELETED.sub("", output))


def started_by(mark: str) -> list[int]:
    """Return the ids of all processes that have the variable MARK with the value `mark`."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found
