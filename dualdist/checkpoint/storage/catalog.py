"""The folder of a manager as its writer sees it: which checkpoints there are, which is best, which must go."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError, DamagedCheckpointError
from .file import TEMPORARY_SUFFIX
from .filesystem import FileSystem
from .format import Manifest, copy_verified, read_manifest
from .memory import MemoryFile

__all__ = ("Best", "Catalog", "Entry", "choose_sound")

logger = logging.getLogger("dualdist")

_NAME = re.compile(r"step-(\d+)\.pt")


@dataclass(frozen=True)
class Best:
    """By which metric the best checkpoint is chosen, and which end of it is good."""

    metric: str
    mode: str

    def worth(self, manifest: Manifest) -> float:
        """Return how good a checkpoint is; minus infinity for one without the metric, or with NaN."""
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
    """Checkpoints of one folder, in the order in which they were saved. For the writer alone."""

    def __init__(self, folder: Path, keep: int | None, best: Best | None, file_system: FileSystem) -> None:
        self.folder = folder
        self._keep = keep
        self._best = best
        self._file_system = file_system
        self._entries: list[Entry] = []
        self._damaged: set[Path] = set()
        """Files that were passed over: they stay for whoever wants to look, and are not among those to keep."""

    def open(self) -> None:
        """Make the folder, look at what it holds, and remove what a writer that was killed has left."""
        self._file_system.make_folder(self.folder)
        for path in self.folder.iterdir():
            if path.name.startswith(".step-") and path.name.endswith(TEMPORARY_SUFFIX):
                self._remove(path)
        self.read()

    def read(self) -> list[str]:
        """Look at the folder, and return what is wrong with each file that has no manifest."""
        found, damaged = [], []
        for path in sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)):
            try:
                found.append(Entry(path, read_manifest(path)))
            except (CheckpointError, OSError) as error:
                damaged.append(str(error))
        self._entries = sorted(found, key=lambda entry: (entry.manifest.serial, entry.path.name))
        return damaged

    def newest_first(self) -> Iterator[Entry]:
        """Yield the checkpoints from the one that was saved last."""
        return reversed(self._entries)

    def best_first(self) -> list[Entry]:
        """Return the checkpoints that have the metric, the best first; of equals the one that was saved last."""
        if self._best is None:
            return []
        worth = {entry.path: self._best.worth(entry.manifest) for entry in self._entries}
        rated = [entry for entry in self.newest_first() if worth[entry.path] > -math.inf]
        return sorted(rated, key=lambda entry: -worth[entry.path])

    def path_of(self, step: int) -> Path:
        """Return where the checkpoint of `step` is or will be."""
        return self.folder / f"step-{step:09d}.pt"

    @property
    def next_serial(self) -> int:
        """Return the serial number of the next checkpoint."""
        return 1 + max((entry.manifest.serial for entry in self._entries), default=0)

    def pass_over(self, entries: Iterable[Entry]) -> None:
        """Note that checkpoints are damaged."""
        self._damaged.update(entry.path for entry in entries)

    def add(self, entry: Entry) -> None:
        """Note a checkpoint that is complete, and remove those that are too many."""
        self._entries = [*(known for known in self._entries if known.path != entry.path), entry]
        self._damaged.discard(entry.path)
        if self._keep is None:
            return
        sound = [known for known in self._entries if known.path not in self._damaged]
        best = [known for known in self.best_first() if known in sound][:1]
        kept = {entry.path for entry in [*sound[-self._keep :], *best]} | self._damaged
        for known in [known for known in self._entries if known.path not in kept]:
            self._remove(known.path)
        self._entries = [known for known in self._entries if known.path in kept]

    def kept(self) -> str:
        """Return a sentence on what there is to go back to."""
        newest = next(self.newest_first(), None)
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


def choose_sound(entries: Iterable[Entry], damaged: list[str], file: MemoryFile) -> Entry | None:
    """Return the first entry that is sound, with its bytes in `file`; None when there are no files at all.

    damaged: what is wrong with files that are no entries. Warns of the files that are passed over, by name. Raises
    DamagedCheckpointError when no file is sound.
    """
    told = list(damaged)
    for entry in entries:
        file.clear()
        try:
            copy_verified(entry.path, file.write)
            file.load(entry.path)
        except (CheckpointError, OSError) as error:
            told.append(str(error))
            continue
        for reason in told:
            logger.warning("Passed over a checkpoint: %s", reason)
        return entry
    if told:
        raise DamagedCheckpointError(
            f"No checkpoint is sound, of {len(told)}: {' '.join(told)} Remove them to start anew."
        )
    return None
