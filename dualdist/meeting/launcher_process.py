"""The process that started the processes of a job on this node. It identifies the job."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..types import Launch


class LauncherProcess(NamedTuple):
    """Process ID and start time (clock ticks since boot), because process IDs are reused."""

    pid: int
    start_time: int

    def is_alive(self) -> bool:
        """Return whether the process still runs."""
        with contextlib.suppress(OSError):
            return _start_time(self.pid) == self.start_time
        return False


def find_launcher_process(variable: str) -> LauncherProcess:
    """Return the process that set `variable` for this one: the nearest ancestor that does not have it itself.

    A shell between the two has inherited the variable, so it is not the launcher.
    """
    prefix, pid = f"{variable}=".encode(), os.getppid()
    while True:
        # The environment of another user's process, such as Slurm's, cannot be read.
        with contextlib.suppress(OSError):
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if any(entry.startswith(prefix) for entry in entries):
                pid = int(_status(pid)[1])
                continue
        return LauncherProcess(pid, _start_time(pid))


def job_digest(launch: Launch, env: Mapping[str, str]) -> str:
    """Return a text that is the same for all processes of this job on this host, and different for other jobs."""
    names = ("PMIX_SERVER_URI", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    job = [f"{name}={env[name]}" for name in sorted(env) if name.startswith(names)]
    job = job or [f"{part}" for part in find_launcher_process(launch.sources["rank"])]
    return hashlib.sha256("\n".join([launch.launcher, *job]).encode()).hexdigest()[:24]


def _start_time(pid: int) -> int:
    return int(_status(pid)[19])


def _status(pid: int) -> list[str]:
    """Return the fields of proc(5)'s stat after the command's name: state, parent, ..., the 20th is the start time."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
