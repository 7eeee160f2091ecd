"""The checkpoints in one folder, as its writer sees them: which exist, which is best, which must be removed."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, DamagedCheckpointError
from .files import TEMPORARY_SUFFIX, FileSystem
from .format import Manifest, MemoryFile, copy_verified, read_manifest, write_checkpoint

logger = logging.getLogger("dualdist")

_NAME = re.compile(r"step-(\d+)\.pt")


@dataclass(frozen=True)
class Best:
    """The metric that decides which checkpoint is best, and whether "max" or "min" of it is good."""

    metric: str
    mode: str

    def score(self, manifest: Manifest) -> float:
        """Return how good a checkpoint is. Minus infinity when the metric is missing or NaN."""
        value = manifest.metrics.get(self.metric, math.nan)
        if math.isnan(value):
            return -math.inf
        return value if self.mode == "max" else -value


@dataclass(frozen=True)
class Entry:
    """One checkpoint."""

    path: Path
    manifest: Manifest


class Catalog:
    """The checkpoints of one folder, in the order in which they were saved. Only the writer uses it."""

    def __init__(self, folder: Path, keep: int | None, best: Best | None, file_system: FileSystem) -> None:
        self.folder = folder
        self._keep = keep
        self._best = best
        self._file_system = file_system
        self._entries: list[Entry] = []
        self._damaged: set[Path] = set()
        """Damaged files that were skipped. They stay for inspection, and do not count as kept checkpoints."""

    def open(self) -> None:
        """Make the folder, list its checkpoints, and remove the temporary files of a writer that was killed."""
        self._file_system.make_folder(self.folder)
        for path in self.folder.iterdir():
            if path.name.startswith(".step-") and path.name.endswith(TEMPORARY_SUFFIX):
                self._remove(path)
        self.read()

    def read(self) -> list[str]:
        """List the checkpoints of the folder again, and return an error text for each file without a manifest."""
        found, damaged = [], []
        for path in sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)):
            try:
                found.append(Entry(path, read_manifest(path)))
            except (CheckpointError, OSError) as error:
                damaged.append(str(error))
        self._entries = sorted(found, key=lambda entry: (entry.manifest.serial, entry.path.name))
        return damaged

    def newest_first(self) -> Iterator[Entry]:
        """Yield the checkpoints, the one that was saved last first."""
        return reversed(self._entries)

    def best_first(self) -> list[Entry]:
        """Return the checkpoints that have the metric, the best first. Of equal ones, the later one is first."""
        if self._best is None:
            return []
        scores = {entry.path: self._best.score(entry.manifest) for entry in self._entries}
        rated = [entry for entry in self.newest_first() if scores[entry.path] > -math.inf]
        return sorted(rated, key=lambda entry: -scores[entry.path])

    def path_of(self, step: int) -> Path:
        """Return the path of the checkpoint of `step`, whether or not it exists."""
        return self.folder / f"step-{step:09d}.pt"

    @property
    def next_serial(self) -> int:
        """Return the serial number of the next checkpoint."""
        return 1 + max((entry.manifest.serial for entry in self._entries), default=0)

    def pass_over(self, entries: Iterable[Entry]) -> None:
        """Record that checkpoints are damaged."""
        self._damaged.update(entry.path for entry in entries)

    def write(self, values: Mapping[str, Any], manifest: Manifest) -> None:
        """Write the checkpoint of `manifest.step`, and remove those beyond the number to keep.

        Raises CheckpointError, which names the newest complete checkpoint, when it cannot be written.
        """
        path = self.path_of(manifest.step or 0)
        try:
            write_checkpoint(path, values, manifest, self._file_system)
        except OSError as error:
            raise CheckpointError(
                f"The checkpoint of step {manifest.step} was not saved: {error}. {self._newest()}"
            ) from error
        self._add(Entry(path, manifest))

    def _add(self, entry: Entry) -> None:
        self._entries = [*(known for known in self._entries if known.path != entry.path), entry]
        self._damaged.discard(entry.path)
        if self._keep is None:
            return
        undamaged = [known for known in self._entries if known.path not in self._damaged]
        best = [known for known in self.best_first() if known in undamaged][:1]
        kept = {entry.path for entry in [*undamaged[-self._keep :], *best]} | self._damaged
        for known in [known for known in self._entries if known.path not in kept]:
            self._remove(known.path)
        self._entries = [known for known in self._entries if known.path in kept]

    def _newest(self) -> str:
        newest = next((entry for entry in self.newest_first() if entry.path.is_file()), None)
        if newest is None:
            return f"No checkpoint is complete in {self.folder}."
        return f"The newest complete checkpoint is that of step {newest.manifest.step}, {newest.path}."

    def _remove(self, path: Path) -> None:
        try:
            self._file_system.remove(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("Could not remove the old checkpoint %s: %s.", path, error)


def first_undamaged(entries: Iterable[Entry], damaged: list[str], file: MemoryFile) -> Entry | None:
    """Return the first entry that is undamaged, with its bytes in `file`. None when there are no files at all.

    damaged: error texts of the files that have no entry. Logs a warning for each file that it skips. Raises
    DamagedCheckpointError when all files are damaged.
    """
    problems = list(damaged)
    for entry in entries:
        file.clear()
        try:
            copy_verified(entry.path, file.write)
            file.load(entry.path)
        except (CheckpointError, OSError) as error:
            problems.append(str(error))
            continue
        for problem in problems:
            logger.warning("Passed over a checkpoint: %s", problem)
        return entry
    if problems:
        raise DamagedCheckpointError(
            f"All {len(problems)} checkpoints are damaged: {' '.join(problems)} Remove them to train from the start."
        )
    return None
