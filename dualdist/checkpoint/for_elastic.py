"""The private part of this package that dualdist.elastic uses, besides the public names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..collectives.objects import on_all_ranks
from ..errors import CheckpointError
from ..world.ranks import rank
from .catalog import Catalog, first_undamaged
from .contents import check_portable, collect, is_per_rank, is_stateful, on_host
from .files import FileSystem
from .format import MemoryFile, make_manifest
from .restoration import restore
from .transfer import from_writer, read_values

__all__ = ("NumberedFiles", "check_values", "from_writer", "is_per_rank", "is_stateful")

logger = logging.getLogger("dualdist")


def check_values(objects: Mapping[str, Any]) -> None:
    """Raise TypeError if a file cannot hold `objects`: a state, for each name an object or a plain value. Local."""
    check_portable(collect(objects, []), "state")


class NumberedFiles:
    """The checkpoints in a folder of this process, counted from 1. Their format is that of `checkpoint.save`.

    folder: must exist. keep: how many of the newest to keep.
    """

    def __init__(self, folder: Path, keep: int, file_system: FileSystem) -> None:
        self._catalog = Catalog(folder, keep, None, file_system)

    def write(self, number: int, objects: Mapping[str, Any]) -> None:
        """Write the checkpoint `number` of `objects`. Local.

        Raises CheckpointError, which names the newest complete checkpoint, when it cannot be written.
        """
        manifest = make_manifest(number, {}, number)
        self._catalog.write(on_host(collect(objects, []), "state"), manifest)

    def restore_newest(self, objects: dict[str, Any], *, read: bool) -> tuple[int, int] | None:
        """Load the newest checkpoint that any rank can read into `objects`, on every rank. Collective over the world.

        Plain values are set in the dictionary. read: whether this rank looks into its folder. Returns the checkpoint's
        number and the rank that has read it, None when there is none. Raises CheckpointError on every rank when it does
        not fit.
        """
        with MemoryFile() as file:
            numbers = on_all_ranks(lambda: self._read_newest(file) if read else 0, CheckpointError)
            newest = max(numbers)
            if not newest:
                return None
            root = numbers.index(newest)
            if rank() != root:
                file.clear()
            name = f"{self._catalog.path_of(newest).name} of rank {root}"
            values = read_values(file, name, root)
        restore(objects, values, strict=True, origin=name)
        return newest, root

    def _read_newest(self, file: MemoryFile) -> int:
        """Copy the newest undamaged checkpoint of the folder into `file`, and return its number, 0 if none."""
        try:
            self._catalog.open()
            entry = first_undamaged(self._catalog.newest_first(), self._catalog.read(), file)
        except (CheckpointError, OSError) as error:
            logger.warning("Rank %d has no checkpoint: %s", rank(), error)
            return 0
        return entry.manifest.serial if entry is not None else 0
