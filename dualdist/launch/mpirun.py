"""Starting a command under mpirun: for `dualdist doctor`, and for the agents of `dualdist run --start-with mpirun`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

__all__ = ("is_open_mpi", "mpirun_command")


def mpirun_command(size: int, command: Sequence[str]) -> list[str] | None:
    """Return the command line that runs `command` in `size` processes of this host; None if mpirun is not on PATH.

    Open MPI's mpirun is allowed to start more processes than there are cores, and to run as root.
    """
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        return None
    options = ["-np", str(size)]
    if is_open_mpi(mpirun):
        options += ["--oversubscribe", *["--allow-run-as-root"] * (os.getuid() == 0)]
    return [mpirun, *options, *command]


def is_open_mpi(mpirun: str) -> bool:
    """Return whether the program `mpirun` is that of Open MPI."""
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return "Open MPI" in version.stdout
