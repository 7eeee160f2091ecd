"""Commits that outlive their processes, for launchers that end all of them and start anew.

Each node keeps the newest commits in a folder, as checkpoints; one process of it writes them. A node may come without
any, or with old ones, and a file may be damaged. So every node says what is the newest that it can read, and the
newest of all is sent to everyone: since ranks hold equal states, any node's file is as good as any other's.

A commit is in the file before `commit()` returns on any rank, so that none is lost: who dies next cannot take it away.
In the temporary folder it is not brought to the disk, as it must outlive processes there and not the machine.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.contents.portable import check_portable, on_host
from ..checkpoint.contents.restoration import restore
from ..checkpoint.contents.state import collect, is_stateful
from ..checkpoint.ranks import from_writer, on_all_ranks
from ..checkpoint.save_and_load import make_manifest, read_values
from ..checkpoint.storage.catalog import Catalog, Entry, choose_sound
from ..checkpoint.storage.filesystem import FileSystem
from ..checkpoint.storage.format import write_checkpoint
from ..checkpoint.storage.memory import MemoryFile
from ..errors import CheckpointError
from ..world.numbers import rank

__all__ = ("Commits", "InMemory")

logger = logging.getLogger("dualdist")

_KEPT = 2
"""The newest, and one to fall back to when that is damaged."""


class InMemory(FileSystem):
    """Leaves it to the system when data go to the disk: they outlive their process, not the machine."""

    def start_writing(self, descriptor: int, start: int, count: int) -> None:
        pass

    def sync(self, descriptor: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


class Commits:
    """The commits of one `elastic.run`."""

    def __init__(self, folder: Path, first_of_node: bool, file_system: FileSystem) -> None:
        """Look into the folder, which must be there. Collective over the world.

        first_of_node: whether this process reads and writes for its node. Raises CheckpointError on every rank when
        a folder cannot be used.
        """
        self._catalog = Catalog(folder, _KEPT, None, file_system)
        self._file_system = file_system
        self._reads = first_of_node
        self._number = 0
        sees_that_of_rank_0 = self._sees_that_of_rank_0(folder)
        self._writes = first_of_node and not sees_that_of_rank_0

    def check(self, objects: Mapping[str, Any]) -> None:
        """Raise TypeError on every rank unless `objects` can be written. Collective over the world."""
        on_all_ranks(lambda: check_portable(collect(objects, []), "state"))

    def save(self, objects: Mapping[str, Any]) -> None:
        """Write one more commit, on one process of each node. Every rank must call it; none waits for another.

        It warns, and training goes on, when that fails: other nodes may have it, and the one before is kept. Raises
        TypeError on every rank that has a plain value which cannot be written, not the writers alone.
        """
        self._number += 1
        plain = {name: value for name, value in objects.items() if not is_stateful(value)}
        check_portable(collect(plain, []), "state")
        if not self._writes:
            return
        manifest = make_manifest(self._number, {}, self._number)
        path = self._catalog.path_of(self._number)
        try:
            write_checkpoint(path, on_host(collect(objects, []), "state"), manifest, self._file_system)
        except OSError as error:
            logger.warning(
                "Commit %d was not saved on the node of rank %d: %s. %s",
                self._number,
                rank(),
                error,
                self._catalog.kept(),
            )
            return
        self._catalog.add(Entry(path, manifest))

    def resume(self, objects: dict[str, Any]) -> bool:
        """Give `objects` the newest commit of all nodes, and return whether there is any. Collective over the world.

        Its plain values are set in the dictionary. Raises CheckpointError on every rank when it does not fit.
        """
        with MemoryFile() as file:
            numbers = on_all_ranks(lambda: self._read_newest(file))
            newest = max(numbers)
            if not newest:
                return False
            owner = numbers.index(newest)
            if rank() != owner:
                file.clear()
            values = read_values(file, f"commit {newest}", owner)
        restore(objects, values, strict=True, origin=f"commit {newest}")
        self._number = newest
        if rank() == 0:
            logger.warning("Going on from commit %d, which rank %d has read.", newest, owner)
        return True

    def _sees_that_of_rank_0(self, folder: Path) -> bool:
        """Return whether this folder is also that of rank 0, which then writes for both. Collective."""
        mark = folder / f".{from_writer(lambda: secrets.token_hex(8))}"
        from_writer(mark.touch)
        seen = on_all_ranks(lambda: rank() != 0 and mark.exists())
        from_writer(mark.unlink)
        return seen[rank()]

    def _read_newest(self, file: MemoryFile) -> int:
        """Fill `file` with the newest commit that this process can read, and return its number, 0 for none."""
        if not self._reads:
            return 0
        try:
            self._catalog.open()
            entry = choose_sound(self._catalog.newest_first(), self._catalog.read(), file)
        except (CheckpointError, OSError) as error:
            logger.warning("Rank %d has no commit: %s", rank(), error)
            return 0
        return entry.manifest.serial if entry is not None else 0
