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
from .world import MPIRUN, ROOT

__all__ = ("LAUNCHERS", "SECONDS", "Ended", "Launcher", "finish", "launch")

SECONDS = 200.0


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
    """How a launch ended."""

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
    mark = f"TEST_LAUNCH={secrets.token_hex(8)}"
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
            "TEST_LAUNCH": mark.partition("=")[2],
        },
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _end_all(mark.encode())
        output, _ = process.communicate()
        raise AssertionError(f"{' '.join(command)} did not end within {seconds:.0f} s:\n{output}") from None
    return Ended(process.returncode, output)


def _end_all(mark: bytes) -> None:
    """End every process with the variable `mark`: torchrun's have sessions of their own."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in file.read_bytes().split(b"\0"):
                os.kill(int(file.parent.name), signal.SIGKILL)
