"""Starting a command under mpirun. Only `dualdist doctor` does: `dualdist run` starts processes without MPI."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

__all__ = ("mpirun_command",)


def mpirun_command(size: int, command: Sequence[str]) -> list[str] | None:
    """Return the command line that runs `command` in `size` processes of this host; None if mpirun is not on PATH.

    Open MPI's mpirun is allowed to start more processes than there are cores, and to run as root.
    """
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        return None
    options = ["-np", str(size)]
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if "Open MPI" in version.stdout:
        options += ["--oversubscribe", *["--allow-run-as-root"] * (os.getuid() == 0)]
    return [mpirun, *options, *command]
