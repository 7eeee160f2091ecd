"""CheckpointManager: when to save, what to keep, what to go back to, and how to end when the scheduler says so."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..collectives import allreduce
from ..errors import CheckpointError
from ..types import Max
from .background import Background
from .contents.portable import HostCopy, on_host
from .contents.restoration import restore
from .contents.rng import RandomState
from .contents.state import check_state, collect
from .ranks import from_writer, is_writer, on_all_ranks
from .save_and_load import gather_own, make_manifest, read_file, read_values
from .schedule import Schedule
from .signals import Preempted, SignalWatch
from .storage.catalog import Best, Catalog, Entry, choose_sound
from .storage.filesystem import FileSystem
from .storage.format import Manifest, write_checkpoint
from .storage.memory import MemoryFile

__all__ = ("CheckpointManager",)

logger = logging.getLogger("dualdist")

_RANDOM = "random"
EX_TEMPFAIL = 75
"""sysexits.h: "temporary failure; the user is invited to retry"."""


class CheckpointManager:
    """Saves a training run into a folder every so often, and brings it back from there.

        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler, "epoch": 0}
        with hvd.checkpoint.CheckpointManager("checkpoints", state, every_steps=500) as manager:
            manager.restore_latest()
            for state["epoch"] in range(state["epoch"], epochs):
                sampler.set_epoch(state["epoch"])
                for images, labels in loader:
                    ...
                    sampler.advance(len(images))
                    manager.step()

    Rank 0 writes and reads; the others need not see the folder. All methods are collective: every rank must call
    them, in the same order; an error of the writer is raised on every rank, and says what there is to go back to. A
    run may catch it and go on: the next save tries again.

    Args:
        directory: made when it is not there. It belongs to this run; two runs must not write into it at once.
        state: as for `checkpoint.save`. Restoring sets the plain values in it.
        keep: how many of the newest checkpoints to keep, besides the best. None: all.
        every_steps: save in every such `step()`. every_seconds: save when so much time has passed since the last save,
            by rank 0's clock. None: do not.
        best: a metric and "max" or "min", such as ("val_accuracy", "max"): the best by that is never removed.
        asynchronous: a save waits until the state is copied to host memory, and writes it beside the next steps. The
            next save waits for it; its errors are raised by the next call. The writer holds one copy of the state.
        signals: ask the run to end: the step is finished, the state saved, and `step()` raises `Preempted`, a
            SystemExit, on every rank, whichever got the signal. Only the main thread can take them over.
        exit_code: with what to exit then; 75 stands for "try again". Tell the scheduler: for Slurm, RequeueExit=75.
        agree_every: exchange a few bytes in every such `step()`, for signals, seconds and errors.
        random_state: save the random number generators of every rank too; see RandomState.
        file_system: for tests.

    Raises:
        ValueError, TypeError: an argument is wrong on this rank; the others raise CheckpointError.
        CheckpointError: rank 0 cannot use the folder.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        state: Mapping[str, Any],
        keep: int | None = 3,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        best: tuple[str, str] | None = None,
        *,
        asynchronous: bool = False,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        exit_code: int = EX_TEMPFAIL,
        agree_every: int = 1,
        random_state: bool = True,
        file_system: FileSystem | None = None,
    ) -> None:
        self.steps = 0
        """How many steps the run has made, those before it was restored included."""
        self._state = state
        self._random = {_RANDOM: RandomState()} if random_state else {}
        self._schedule = Schedule(every_steps, every_seconds, agree_every, bool(signals) or asynchronous)
        self._file_system = file_system or FileSystem()
        options = on_all_ranks(lambda: self._check(keep, best, asynchronous, exit_code))
        if any(other != options[0] for other in options):
            raise ValueError(
                f"The options of a manager must be equal on all ranks, but are {options} instead."
            )
        self._catalog = Catalog(Path(directory), keep, best and Best(*best), self._file_system)
        from_writer(self._open)
        self._exit_code = exit_code
        self._watch = SignalWatch(signals)
        self._asynchronous = asynchronous
        self._background = Background()
        self._copy = HostCopy()
        self._saved_step: int | None = None
        self._saved_at = time.monotonic()

    def step(self, metrics: Mapping[str, float] | None = None) -> bool:
        """Count a step of training, save when it is time, and return whether it was. Call it after each step.

        metrics: kept with the checkpoint, for `best`. Raises Preempted when a rank was sent a signal, CheckpointError
        as `save` does, and for an asynchronous save that has failed since.
        """
        self.steps += 1
        preempted, late, failed = self._agree() if self._schedule.agrees(self.steps) else (0, 0, 0)
        if failed:
            self._raise_failure(preempted)
        due = bool(late) or self._schedule.is_due(self.steps)
        if due or preempted:
            self._save(metrics or {}, self._asynchronous and not preempted)
        if preempted:
            raise Preempted(self._exit_code, preempted)
        return due

    def save(self, metrics: Mapping[str, float] | None = None) -> None:
        """Save now, as at the end of an epoch with its `metrics`; the checkpoint of the same step is replaced.

        Raises CheckpointError on every rank when it was not saved, or when the asynchronous save before was not.
        """
        self._save(metrics or {}, self._asynchronous)

    def wait(self) -> None:
        """Wait for an asynchronous save under way. Raises CheckpointError on every rank when it has failed."""
        if self._asynchronous:
            from_writer(self._background.finish)

    def restore_latest(self, *, strict: bool = True) -> Manifest | None:
        """Load the checkpoint that was saved last, and return its manifest; None when there is none yet.

        Rank 0 chooses. Files that are damaged, or hold what only running code could load, are passed over with a
        warning that names them. strict: as for `checkpoint.load`. Raises DamagedCheckpointError when there are files
        and none is sound, CheckpointError when the one that is chosen does not fit.
        """
        return self._restore(lambda file: self._choose(self._catalog.newest_first, file), strict)

    def restore_best(self, *, strict: bool = True) -> Manifest | None:
        """Load the best checkpoint instead; None when none has the metric. Otherwise as `restore_latest`."""
        return self._restore(lambda file: self._choose(self._catalog.best_first, file), strict)

    def restore(self, path: str | os.PathLike[str], *, strict: bool = True) -> None:
        """Load the checkpoint `path`, in the folder or not, and count the steps on from it.

        What is saved from then on comes after all that is in the folder. Errors as for `checkpoint.load`.
        """
        self._restore(lambda file: Entry(Path(path), read_file(Path(path), file)), strict)
        self._saved_step = None

    def close(self) -> None:
        """Finish the save under way and give the signals back. Raises CheckpointError when that save has failed."""
        self._watch.restore()
        try:
            self.wait()
        finally:
            self._background.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not isinstance(error, Preempted):  # which a launcher may send once more while this process ends
            self._watch.restore()  # the ranks may have parted: a save under way ends by itself

    def _check(
        self, keep: int | None, best: tuple[str, str] | None, asynchronous: bool, exit_code: int
    ) -> str:
        """Raise ValueError or TypeError for what is wrong, and return what must be equal on all ranks."""
        check_state(self._state)
        self._schedule.check()
        if self._random and _RANDOM in self._state:
            raise ValueError(
                f"`state` must not have a name {_RANDOM!r}, which the manager uses. Pass random_state=False."
            )
        if keep is not None and keep < 1:
            raise ValueError(f"`keep` must be at least 1 or None, but is {keep} instead.")
        if best is not None and (
            not isinstance(best, tuple | list) or len(best) != 2 or best[1] not in ("max", "min")
        ):
            raise ValueError(f"`best` must be a metric and 'max' or 'min', but is {best!r} instead.")
        if not 0 <= exit_code < 256:
            raise ValueError(f"`exit_code` must be at least 0 and less than 256, but is {exit_code} instead.")
        names = sorted({**self._state, **self._random})
        return f"{self._schedule}, asynchronous={asynchronous}, exit_code={exit_code}, state={names}"

    def _open(self) -> None:
        try:
            self._catalog.open()
        except OSError as error:
            raise CheckpointError(f"`directory` must be a folder that can be used, but {error}.") from error

    def _raise_failure(self, preempted: int) -> None:
        try:
            self.wait()
        except CheckpointError as error:
            if not preempted:
                raise
            logger.error("%s", error)  # there is one more save to make

    def _agree(self) -> list[int]:
        late = is_writer() and self._schedule.is_late(time.monotonic() - self._saved_at)
        told: list[int] = allreduce(
            torch.tensor([self._watch.received, late, self._background.failed]), op=Max, name=None
        ).tolist()
        return told

    def _save(self, metrics: Mapping[str, float], asynchronous: bool) -> None:
        self.wait()
        if not metrics and self._saved_step == self.steps:
            return
        everything = self._everything()
        own = gather_own(everything)
        self._saved_at = time.monotonic()
        from_writer(lambda: self._start(everything, own, metrics, asynchronous))
        self._saved_step = self.steps

    def _start(
        self,
        state: Mapping[str, Any],
        own: list[dict[str, Any]],
        metrics: Mapping[str, float],
        asynchronous: bool,
    ) -> None:
        manifest = make_manifest(self.steps, metrics, self._catalog.next_serial)
        values = (self._copy.take if asynchronous else on_host)(collect(state, own), "state")
        if asynchronous:
            self._background.start(lambda: self._write(values, manifest))
        else:
            self._write(values, manifest)

    def _write(self, values: Mapping[str, Any], manifest: Manifest) -> None:
        path = self._catalog.path_of(manifest.step or 0)
        try:
            write_checkpoint(path, values, manifest, self._file_system)
        except OSError as error:
            raise CheckpointError(
                f"The checkpoint of step {manifest.step} was not saved: {error}. {self._catalog.kept()}"
            ) from error
        self._catalog.add(Entry(path, manifest))

    def _everything(self) -> Mapping[str, Any]:
        return ChainMap(self._state, self._random)  # type: ignore[arg-type] # values are set in the first

    def _choose(self, candidates: Callable[[], Iterable[Entry]], file: MemoryFile) -> Entry | None:
        damaged = self._catalog.read()
        entries = list(candidates())
        chosen = choose_sound(entries, damaged, file)
        if chosen is not None:
            self._catalog.pass_over(entries[: entries.index(chosen)])
        return chosen

    def _restore(self, choose: Callable[[MemoryFile], Entry | None], strict: bool) -> Manifest | None:
        self.wait()
        with MemoryFile() as file:
            entry = from_writer(lambda: choose(file))
            if entry is None:
                return None
            values = read_values(file, entry.path)
        everything = self._everything()
        restore(everything, values, strict=strict, origin=entry.path)
        self.steps = self._saved_step = entry.manifest.step or 0
        return entry.manifest
