"""The checkpoints in one folder, as its writer sees them: which exist, which is best, which must be removed."""

from __future__ import annotations

import logging
import math
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, DamagedCheckpointError
from .format import TEMPORARY_SUFFIX, Manifest, MemoryFile, copy_verified, read_manifest, write_checkpoint

logger = logging.getLogger("dualdist")

_ANY_NAME = re.compile(r"step-\d+(\.pt)?")
"""The names of the checkpoints of all kinds of catalogs."""


@dataclass(frozen=True)
class CatalogEntry:
    """One checkpoint."""

    path: Path
    manifest: Manifest


class Catalog:
    """The checkpoints of one folder, in the order in which they were saved. Only the processes that write use it.

    Each is a file here. A subclass may have others: it overrides `pattern`, `sharded`, `place`, `file_of` and `remove`.

    Damaged files stay for inspection, but are not among its entries.

    keep: how many of the newest checkpoints to keep, besides the best. None: all.
    best: the metric that decides which checkpoint is best, and whether "max" or "min" of it is good.
    durable: as for `replacing`.
    """

    pattern = re.compile(r"step-(\d+)\.pt")
    sharded = False
    """The setting of CheckpointManager that has such a catalog."""

    def __init__(
        self, folder: Path, keep: int | None, best: tuple[str, str] | None = None, *, durable: bool = True
    ) -> None:
        self.folder = folder.absolute()  # the program may change its working directory
        self._keep = keep
        self._best = best
        self._durable = durable
        self._entries: list[CatalogEntry] = []
        self._rejected: dict[Path, str] = {}
        self._last_serial = 0
        """The highest serial number that any file had, even a damaged one. Later checkpoints get higher ones."""

    def open(self) -> None:
        """Make the folder, list its checkpoints, and remove the temporary files of a writer that was killed."""
        os.makedirs(self.folder, exist_ok=True)
        for path in self.folder.iterdir():
            if path.name.startswith(".step-") and path.name.endswith(TEMPORARY_SUFFIX):
                self.remove(path)
        self._read()

    def find(self, file: MemoryFile, *, best: bool = False) -> CatalogEntry | None:
        """Copy the undamaged checkpoint that was saved last into `file`, and return its entry; None if there are none.

        best: the one with the best metric instead. Logs a warning for each damaged file that it skips. Raises
        DamagedCheckpointError when all files are damaged.
        """
        problems = self._read()
        for entry in self._best_first() if best else self._entries[::-1]:
            file.clear()
            try:
                copy_verified(self.file_of(entry.path), file.append)
                file.load(entry.path)
            except (CheckpointError, OSError) as error:
                problems.append(str(error))
                self._entries.remove(entry)
                continue
            for problem in problems:
                logger.warning("Passed over a checkpoint: %s", problem)
            return entry
        if problems:
            raise DamagedCheckpointError(
                f"All {len(problems)} checkpoints are damaged: {' '.join(problems)} Remove them to train from the "
                "start."
            )
        if not self._entries and any(_ANY_NAME.fullmatch(path.name) for path in self.folder.iterdir()):
            logger.warning(
                "%s has checkpoints, but none that CheckpointManager(sharded=%s) reads. To load them, pass sharded=%s.",
                self.folder,
                self.sharded,
                not self.sharded,
            )
        return None

    def write(self, values: Mapping[str, Any], manifest: Manifest) -> None:
        """Write the checkpoint of `manifest.step`, and remove those beyond the number to keep.

        Raises CheckpointError, which names the newest complete checkpoint, when it cannot be written. It calls no
        collective, because it may run in another thread.
        """
        try:
            path = self.place(values, manifest)
        except OSError as error:
            raise CheckpointError(
                f"The checkpoint of step {manifest.step} was not saved: {error}. {self.newest()}"
            ) from error
        self._rejected.pop(path, None)
        self._list([*(known for known in self._entries if known.path != path), CatalogEntry(path, manifest)])
        if self._keep is not None:
            kept = self._entries[-self._keep :] + self._best_first()[:1]
            for entry in [known for known in self._entries if known not in kept]:
                self.remove(entry.path)
                self._entries.remove(entry)

    def place(self, values: Mapping[str, Any], manifest: Manifest) -> Path:
        """Write a checkpoint, and return its path."""
        path = self.folder / f"step-{manifest.step or 0:09d}.pt"
        write_checkpoint(path, values, manifest, durable=self._durable)
        return path

    def reject(self, entry: CatalogEntry, problem: str) -> None:
        """Let `find` pass over a checkpoint that is found to be damaged."""
        self._rejected[entry.path] = problem

    @property
    def next_serial(self) -> int:
        """The serial number of the next checkpoint."""
        return self._last_serial + 1

    def file_of(self, path: Path) -> Path:
        """Return the file with the manifest of the checkpoint `path`."""
        return path

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, or an incomplete one. Logs a warning if that is not possible."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("Could not remove the old checkpoint %s: %s.", path, error)

    def _read(self) -> list[str]:
        """List the checkpoints of the folder, and return an error text for each file without a manifest."""
        found, problems = [], []
        for path in sorted(path for path in self.folder.iterdir() if self.pattern.fullmatch(path.name)):
            try:
                if path in self._rejected:
                    raise DamagedCheckpointError(self._rejected[path])
                found.append(CatalogEntry(path, read_manifest(self.file_of(path))))
            except (CheckpointError, OSError) as error:
                problems.append(str(error))
        self._list(sorted(found, key=lambda entry: entry.manifest.serial))
        return problems

    def _list(self, entries: list[CatalogEntry]) -> None:
        self._entries = entries
        self._last_serial = max([self._last_serial, *(entry.manifest.serial for entry in entries)])

    def _best_first(self) -> list[CatalogEntry]:
        """Return the checkpoints that have the metric, the best first. Of equal ones, the later one is first."""
        if self._best is None:
            return []
        metric, mode = self._best
        rated = [(entry.manifest.metrics.get(metric, math.nan), entry) for entry in self._entries[::-1]]
        rated = [(value, entry) for value, entry in rated if not math.isnan(value)]
        return [entry for _, entry in sorted(rated, key=operator.itemgetter(0), reverse=mode == "max")]

    def newest(self) -> str:
        """Return, as a sentence, which complete checkpoint is the newest."""
        newest = next((entry for entry in self._entries[::-1] if self.file_of(entry.path).is_file()), None)
        if newest is None:
            return f"No checkpoint is complete in {self.folder}."
        return f"The newest complete checkpoint is that of step {newest.manifest.step}, {newest.path}."
