"""Commits that survive their processes, for launchers that end all processes and start new ones.

Each node keeps the newest commits in a folder, as checkpoints; one process of the node writes them. A node may have no
commits or only old ones, and a file may be damaged. So every node reports the newest commit that it can read, and the
newest of all is sent to every rank. Ranks hold equal states, so any node's file is as good as another's.

The commit is in the file before `commit()` returns on any rank, so it is not lost when a process dies later. In
the temporary folder, files are not synced to the disk: they must survive processes, not the machine.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint import FileSystem
from ..checkpoint.for_elastic import NumberedFiles, check_values, from_writer, is_stateful
from ..collectives.objects import on_all_ranks
from ..errors import CheckpointError
from ..launch import ELASTIC_DIR
from ..meeting import LauncherProcess, find_launcher_process
from ..world.ranks import rank

# The folder of a job's commits on this node.

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


logger = logging.getLogger("dualdist")

_KEPT = 2
"""The newest commit, and one to use when the newest is damaged."""


class InMemory(FileSystem):
    """Lets the system decide when data reach the disk: they survive their process, not the machine."""

    def start_writing(self, descriptor: int, start: int, count: int) -> None:
        pass

    def sync(self, descriptor: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


class Commits:
    """The commits of one `elastic.run`."""

    def __init__(self, folder: Path, first_of_node: bool, file_system: FileSystem) -> None:
        """Find out which processes write. `folder` must exist. Collective over the world.

        first_of_node: whether this process reads and writes for its node. Raises CheckpointError on every rank when
        a folder cannot be used.
        """
        self._files = NumberedFiles(folder, _KEPT, file_system)
        self._reads = first_of_node
        self._number = 0
        shared_with_rank_0 = self._is_shared_with_rank_0(folder)
        self._writes = first_of_node and not shared_with_rank_0

    def check(self, objects: Mapping[str, Any]) -> None:
        """Raise TypeError if `objects` cannot be written, CheckpointError if another rank's cannot. Collective."""
        on_all_ranks(lambda: check_values(objects), CheckpointError)

    def save(self, objects: Mapping[str, Any]) -> None:
        """Write the next commit, on one process of each node. Every rank must call it; none waits for another.

        When writing fails, it logs a warning and training continues: other nodes may have the commit, and the last one
        is kept. Raises TypeError on every rank that has a plain value which cannot be written, not only on writers.
        """
        self._number += 1
        check_values({name: value for name, value in objects.items() if not is_stateful(value)})
        if not self._writes:
            return
        try:
            self._files.write(self._number, objects)
        except CheckpointError as error:
            logger.warning("Commit %d is missing on the node of rank %d: %s", self._number, rank(), error)

    def resume(self, objects: dict[str, Any]) -> bool:
        """Load the newest commit of all nodes into `objects`, and return whether there is one. Collective.

        Plain values are set in the dictionary. Raises CheckpointError on every rank when the commit does not fit.
        """
        restored = self._files.restore_newest(objects, read=self._reads)
        if restored is None:
            return False
        self._number, root = restored
        if rank() == 0:
            logger.warning("Resuming from commit %d, which rank %d has read.", self._number, root)
        return True

    def _is_shared_with_rank_0(self, folder: Path) -> bool:
        """Return whether this folder is also that of rank 0, which then writes for both. Collective."""
        mark = folder / f".{from_writer(lambda: secrets.token_hex(8))}"
        from_writer(mark.touch)
        seen = on_all_ranks(lambda: rank() != 0 and mark.exists(), CheckpointError)
        from_writer(mark.unlink)
        return seen[rank()]
