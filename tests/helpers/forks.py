"""Starting processes of tests as forks of one that has imported torch and dualdist, which takes most of a launch.

A launcher starts a small client instead of Python, which takes milliseconds (fork_client.py). The client asks a server
for a fork (fork_server.py), which runs the script with the arguments, environment, folder and files of the client.
With `pytest --all`, the files NEW_INTERPRETERS of selection.py do without: their processes are new interpreters, as a
user's are.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

BIN = Path(sys.executable).parent
MPI_FOLDER = Path(os.environ.get("TEST_MPI_FOLDER", BIN.parent / "mpi"))
"""Where ci/setup has installed other MPIs than that of the system, each in its own folder."""
LAUNCHERS = (f"{BIN}/torchrun", f"{BIN}/horovodrun")
"""Launchers that are written in Python."""
DUALDIST = (
    sys.executable,
    "-c",
    "import sys; from dualdist.cli import main; from dualdist.processes import hosts; "
    "sys.executable = sys.argv.pop(1); sys.exit(main(sys.argv[1:]))",
    sys.executable,
)
"""The command `dualdist`. The scripts that it starts are forks if it is one; its agents are interpreters."""
CLIENT, SERVER = (Path(__file__).with_name(f"fork_{side}.py") for side in ("client", "server"))

_used = False


def use_forks(forks: bool) -> None:
    """Choose whether `forked` has an effect."""
    global _used
    _used = forks


def forked(command: Sequence[str]) -> list[str]:
    """Return `command` with a client of the server in place of each Python in it, which launchers are too."""
    if not _used:
        return list(command)
    clients = {sys.executable: [_server().python], **{file: [_server().python, file] for file in LAUNCHERS}}
    return [word for part in command for word in clients.get(part, [part])]


def fork_variables() -> dict[str, str]:
    """Return the variables with which torchrun starts scripts by the client, too."""
    return {"PYTHON_EXEC": _server().python} if _used else {}


def fork_of(pid: int) -> int:
    """Return the process that does the work of the process `pid`: its fork if it is a client, else itself."""
    with contextlib.suppress(OSError):
        kind, _, fork = Path(f"/proc/{pid}/comm").read_text().partition(" ")
        return int(fork) if kind == "fork" else pid
    return pid


class _Server:
    """The server's process, which ends with this one."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="fork-server-")
        self.python = f"{folder}/python"
        """The client, which takes the place of Python."""
        Path(self.python).write_text(f'#!/bin/sh\nexec {sys.executable} -IS {CLIENT} {folder}/socket "$@"\n')
        Path(self.python).chmod(0o755)
        process = subprocess.Popen(
            [sys.executable, str(SERVER), f"{folder}/socket"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        weakref.finalize(self, _stop, process, folder)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"


def _stop(process: subprocess.Popen[bytes], folder: str) -> None:
    with process:  # closes the server's input, at which it ends
        pass
    shutil.rmtree(folder)


_starting = threading.Lock()


def _server() -> _Server:
    with _starting:
        return _only_server()


@functools.cache
def _only_server() -> _Server:
    return _Server()
