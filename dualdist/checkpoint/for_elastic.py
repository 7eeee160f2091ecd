"""The checkpoints that dualdist.elastic uses to survive a restart of all processes.

Each node keeps the newest ones in a folder; one process of the node writes them. A node may have no checkpoints or only
old ones, and a file may be damaged. So every node reports the newest that it can read, and the newest of all is sent to
every rank. Ranks hold equal states, so any node's file is as good as another's.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.collectives.objects import if_all_succeed
from ..core.lifecycle import rank
from ..errors import CheckpointError, logger
from .catalog import Catalog, CatalogEntry
from .contents import check_state, collect, collect_own, on_host, to_portable
from .contents import is_collective as is_collective
from .contents import is_per_rank as is_per_rank
from .contents import is_stateful as is_stateful
from .format import MemoryFile, make_manifest
from .save_and_load import from_writer, load_into, receive_checkpoint

_KEPT = 2
"""The newest commit, and one to use when the newest is damaged."""


class Commits:
    """The commits of one `elastic.run`: numbered checkpoints of a state, in the format of `checkpoint.save`.

    A commit is in the file before `save` returns on its rank, so it is not lost when a process dies later.
    """

    def __init__(self, folder: Path, first_of_node: bool, *, durable: bool = True) -> None:
        """Find out which processes write. `folder` must exist. Collective over the world.

        first_of_node: whether this process reads and writes for its node. durable: as for `replacing`. Raises
        CheckpointError on every rank when a folder cannot be used.
        """
        self._catalog = Catalog(folder, _KEPT, durable=durable)
        self._reads = first_of_node
        self._number = 0
        is_shared = _is_shared_with_rank_0(folder)  # collective, so not after `and`
        self._writes = first_of_node and not is_shared

    def resume(self, objects: dict[str, Any]) -> bool:
        """Load the newest commit of all nodes into `objects`, and return whether there is one. Collective.

        Plain values are set in the dictionary. Raises TypeError if `objects` cannot be written, CheckpointError if
        another rank's cannot; CheckpointError on every rank when the commit does not fit.
        """
        if_all_succeed(lambda: _check(objects), CheckpointError)
        found = receive_checkpoint(self._find if self._reads else None)
        if found is None:
            return False
        root, entry, values = found
        load_into(objects, values, strict=True, origin=f"{entry.path.name} of rank {root}")
        self._number = entry.manifest.serial
        if rank() == 0:
            logger.warning("Resuming from commit %d, which rank %d has read.", self._number, root)
        return True

    def save(self, objects: Mapping[str, Any]) -> None:
        """Write the next commit, on one process of each node. Every rank must call it.

        None waits for another, unless `objects` has a state that is collective.

        When writing fails, it logs a warning and training continues: other nodes may have the commit, and the last one
        is kept. Raises TypeError on every rank that has a plain value which cannot be written, not only on writers.
        """
        self._number += 1
        _check({name: value for name, value in objects.items() if not is_stateful(value)})
        own = collect_own(objects, writes=self._writes)
        if not self._writes:
            return
        try:
            manifest = make_manifest(self._number, {}, self._number)
            self._catalog.write(on_host(collect(objects, [own]), "state"), manifest)
        except CheckpointError as error:
            logger.warning("Commit %d is missing on the node of rank %d: %s", self._number, rank(), error)

    def _find(self, file: MemoryFile) -> CatalogEntry | None:
        """Copy the newest undamaged commit of the folder into `file`, and return its entry."""
        try:
            self._catalog.open()
            return self._catalog.find(file)
        except (CheckpointError, OSError) as error:
            logger.warning("Rank %d has no commit: %s", rank(), error)
            return None


def _check(objects: Mapping[str, Any]) -> None:
    check_state(objects)
    to_portable(collect(objects, []), "state", lambda tensor, where: tensor)  # copies nothing


def _is_shared_with_rank_0(folder: Path) -> bool:
    """Return whether this folder is also that of rank 0, which then writes for both. Collective."""
    mark = folder / from_writer(lambda: f".{secrets.token_hex(8)}")
    from_writer(mark.touch)
    is_seen = if_all_succeed(lambda: rank() != 0 and mark.exists(), CheckpointError)
    from_writer(mark.unlink)
    return is_seen
