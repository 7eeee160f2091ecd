"""The checkpoints in one folder, as its writer sees them: which exist, which is best, which must be removed."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, DamagedCheckpointError, logger
from .format import TEMPORARY_SUFFIX, Manifest, MemoryFile, copy_verified, read_manifest, write_checkpoint

_ANY_NAME = re.compile(r"step-\d+(\.pt)?")
"""The names of the checkpoints of all kinds of catalogs."""
_OWNER = ".dualdist-owner"
"""The file that names the job which saves into the folder."""
_STARTED = datetime.datetime.now(datetime.timezone.utc).isoformat()


@dataclass(frozen=True)
class CatalogEntry:
    """One checkpoint."""

    path: Path
    manifest: Manifest


Find = Callable[[MemoryFile], CatalogEntry | None]
"""Copies a checkpoint into the file and returns its entry, or returns None."""


class Catalog:
    """The checkpoints of one folder, in the order in which they were saved. Only the processes that write use it.

    Each is a file here. A subclass may have others: it overrides `suffix`, `sharded`, `place`, `file_of` and `remove`.

    Damaged files stay for inspection, but are not among its entries.

    keep: how many of the newest checkpoints to keep, besides the best. None: all.
    best: the metric that decides which checkpoints are best, whether "max" or "min" is good, and how many to keep.
    durable: as for `replacing`.
    """

    suffix = ".pt"
    """Of the names of checkpoints."""
    sharded = False
    """The setting of CheckpointManager that has such a catalog."""

    def __init__(
        self, folder: Path, keep: int | None, best: tuple[str, str, int] | None = None, *, durable: bool = True
    ) -> None:
        self.folder = folder.absolute()  # the program may change its working directory
        self._keep, self._best, self._durable = keep, best, durable
        self._job = f"process {os.getpid()} on {socket.gethostname()}, started {_STARTED}"
        """What other jobs call this one. It differs between any two starts of a process."""
        self._is_claimed = False
        self._entries: list[CatalogEntry] = []
        self.rejected: dict[Path, str] = {}
        """Checkpoints that `find` passes over, because a rank has found them to be damaged, and why."""
        self.next_serial = 1
        """Higher than the serial number of every checkpoint that was listed, even if its data are damaged."""

    def open(self) -> None:
        """Make the folder, list its checkpoints, and remove the temporary files of a writer that was killed."""
        os.makedirs(self.folder, exist_ok=True)
        for path in self.folder.iterdir():
            if path.name.startswith(".step-") and path.name.endswith(TEMPORARY_SUFFIX):
                self.remove(path)
        self._read()

    def find(self, file: MemoryFile, *, best: bool = False) -> CatalogEntry | None:
        """Copy the undamaged checkpoint that was saved last into `file`, and return its entry; None if there is none.

        best: the one with the best metric instead; None if none has the metric. Logs a warning for each damaged file
        that it skips. When none can be loaded, raises DamagedCheckpointError if one is damaged, else CheckpointError.
        """
        problems, found = self._read(), None
        for entry in self._best_first() if best else self._entries[::-1]:
            file.clear()
            try:
                copy_verified(self.file_of(entry.path), file.append)
                file.load(entry.path)
                found = entry
                break
            except (CheckpointError, OSError) as error:
                problems.append(error)
                self._entries.remove(entry)
        if problems and not self._entries:
            is_damaged = any(isinstance(error, DamagedCheckpointError) for error in problems)
            MatchingError = DamagedCheckpointError if is_damaged else CheckpointError
            raise MatchingError(
                f"None of the {len(problems)} checkpoints can be loaded: {' '.join(map(str, problems))} Move them to "
                "another folder to train from the start."
            )
        for problem in problems:
            logger.warning("Passed over a checkpoint: %s", problem)
        if not self._entries and any(_ANY_NAME.fullmatch(path.name) for path in self.folder.iterdir()):
            logger.warning(
                "%s has checkpoints, but none that CheckpointManager(sharded=%s) reads. To load them, pass sharded=%s.",
                self.folder,
                self.sharded,
                not self.sharded,
            )
        return found

    def claim(self) -> None:
        """Note in the folder that this job saves there. Raises CheckpointError if another one does since."""
        note = self.folder / _OWNER
        with contextlib.suppress(OSError):  # the folder is read-only, for example: the save reports it
            owner = note.read_text(errors="replace") if note.exists() else ""
            if self._is_claimed and owner not in ("", self._job):
                raise CheckpointError(
                    f"`directory` must be the folder of one job, but another one saves into {self.folder}, too: "
                    f"{owner}. End one of them, or give it another folder."
                )
            if owner != self._job:
                note.unlink(missing_ok=True)  # it may be another user's
                note.write_text(self._job)
            self._is_claimed = True

    def write(self, values: Mapping[str, Any], manifest: Manifest) -> None:
        """Write the checkpoint of `manifest.step`, and remove those beyond the number to keep.

        Raises CheckpointError, with the newest complete checkpoint. Local: it may run in another thread.
        """
        path = self.path_of(manifest.step or 0)
        try:
            self.place(path, values, manifest)
        except OSError as error:
            raise self.not_saved(manifest.step, f"{error}.") from error
        self.rejected.pop(path, None)
        self._list([*(known for known in self._entries if known.path != path), CatalogEntry(path, manifest)])
        if self._keep is not None:
            kept = self._entries[-self._keep :] + self._best_first()[: self._best[2] if self._best else 0]
            for entry in [known for known in self._entries if known not in kept]:
                self.remove(entry.path)
                self._entries.remove(entry)

    def would_lose(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Return those of `metrics` that are NaN, but numbers in the checkpoint of `step`, which they would replace."""
        known = {entry.path: entry.manifest.metrics for entry in self._entries}.get(self.path_of(step), {})
        return [name for name in known if math.isnan(metrics.get(name, 0)) and not math.isnan(known[name])]

    def path_of(self, step: int) -> Path:
        """Return the path of the checkpoint of `step`."""
        return self.folder / f"step-{step:09d}{self.suffix}"

    def place(self, path: Path, values: Mapping[str, Any], manifest: Manifest) -> None:
        """Write the checkpoint `path`."""
        write_checkpoint(path, values, manifest, durable=self._durable)

    def file_of(self, path: Path) -> Path:
        """Return the file with the manifest of the checkpoint `path`."""
        return path

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, or an incomplete one. Logs a warning if that is not possible."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("Could not remove the old checkpoint %s: %s.", path, error)

    def _read(self) -> list[Exception]:
        """List the checkpoints of the folder, and return an error for each file without a manifest."""
        found: list[CatalogEntry] = []
        problems: list[Exception] = []
        pattern = re.compile(r"step-\d+" + re.escape(self.suffix))
        for path in sorted(path for path in self.folder.iterdir() if pattern.fullmatch(path.name)):
            try:
                if path in self.rejected:
                    raise DamagedCheckpointError(self.rejected[path])
                found.append(CatalogEntry(path, read_manifest(self.file_of(path))))
            except (CheckpointError, OSError) as error:
                problems.append(error)
        self._list(sorted(found, key=lambda entry: entry.manifest.serial))
        return problems

    def _list(self, entries: list[CatalogEntry]) -> None:
        self._entries = entries
        self.next_serial = max([self.next_serial, *(entry.manifest.serial + 1 for entry in entries)])

    def _best_first(self) -> list[CatalogEntry]:
        """Return the checkpoints that have the metric, the best first. Of equal ones, the later one is first."""
        if self._best is None:
            return []
        metric, mode, _ = self._best
        rated = [entry for entry in self._entries[::-1] if not math.isnan(entry.manifest.metrics.get(metric, math.nan))]
        return sorted(rated, key=lambda entry: entry.manifest.metrics[metric], reverse=mode == "max")

    def not_saved(self, step: int | None, reason: str) -> CheckpointError:
        """Return the error of a save, which names the newest complete checkpoint."""
        return CheckpointError(f"The checkpoint of step {step} was not saved: {reason} {self.newest()}")

    def newest(self) -> str:
        """Return, as a sentence, which complete checkpoint is the newest."""
        newest = next((entry for entry in self._entries[::-1] if self.file_of(entry.path).is_file()), None)
        if newest is None:
            return f"No checkpoint is complete in {self.folder}."
        return f"The newest complete checkpoint is that of step {newest.manifest.step}, {newest.path}."
