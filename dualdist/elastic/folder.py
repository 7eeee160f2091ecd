"""The folder of a job's commits on this node."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import CheckpointError
from ..launch import ELASTIC_DIR
from ..rendezvous import LauncherProcess, find_launcher_process

__all__ = ("folder_of_commits", "make_private", "remove_abandoned")

_RUN_ID = "TORCHELASTIC_RUN_ID"
_OF_AGENT = "{prefix}{pid}-{start}"


def folder_of_commits(env: Mapping[str, str], program: Sequence[str], number: int) -> Path:
    """Return the folder for the commits of the program's `number`-th `elastic.run`.

    A folder that the user sets is used as it is, so that a job which is started again continues from it. Otherwise the
    folder belongs to the torchrun process of this node, because only that lives as long as the job. The run id alone is
    not enough: jobs reuse it, and the default "none" is the same for all.
    """
    if env.get(ELASTIC_DIR):
        return Path(env[ELASTIC_DIR]) / f"run-{number}"
    torchrun = find_launcher_process(_RUN_ID)
    agent = _OF_AGENT.format(prefix=_prefix(), pid=torchrun.pid, start=torchrun.start_time)
    name = hashlib.sha256("\0".join([env[_RUN_ID], *program]).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / agent / f"{name}-{number}"


def make_private(folder: Path, env: Mapping[str, str]) -> None:
    """Make the folder. Under the temporary folder, only this user may access it.

    Raises CheckpointError when its parent is not a folder of this user.
    """
    if not env.get(ELASTIC_DIR):
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        status = folder.parent.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            raise CheckpointError(
                f"{folder.parent} must be a folder of this user, but is not. Remove it, or set {ELASTIC_DIR}."
            )
    folder.mkdir(parents=True, exist_ok=True)


def remove_abandoned() -> None:
    """Remove the folders under the temporary folder whose torchrun process has ended."""
    pattern = re.compile(re.escape(_prefix()) + r"(\d+)-(\d+)")
    for folder in Path(tempfile.gettempdir()).iterdir():
        of_agent = pattern.fullmatch(folder.name)
        if of_agent is not None and not LauncherProcess(int(of_agent[1]), int(of_agent[2])).is_alive():
            shutil.rmtree(folder, ignore_errors=True)


def _prefix() -> str:
    """Return the start of the folders' names. It identifies boot and container, in which process ids are unique."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    place = hashlib.sha256((boot + os.readlink("/proc/self/ns/pid")).encode()).hexdigest()[:12]
    return f"dualdist-elastic-{os.getuid()}-{place}-"
