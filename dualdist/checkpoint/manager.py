"""CheckpointManager: when to save, which checkpoints to keep, how to resume, and how to end on a signal."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from ..agreement import call_kinds
from ..checks import flag, integer, number
from ..checks import path as checked_path
from ..collectives import allreduce
from ..collectives.objects import on_all_ranks
from ..errors import CheckpointError
from ..types import Max
from ..world.process_sets import reporting
from .catalog import Best, Catalog, Entry, first_undamaged
from .contents import HostCopy, check_state, collect, on_host
from .files import FileSystem
from .format import Manifest, MemoryFile, make_manifest
from .restoration import RandomState, restore
from .save_and_load import check_file_system, check_signals, checked_metrics, checked_strict
from .transfer import from_writer, gather_own, is_writer, read_file, read_values

# After which steps a manager saves, and after which the ranks exchange signals and errors.


@dataclass(frozen=True)
class Schedule:
    """The rules that decide when to save and when to exchange; equal on all ranks."""

    every_steps: int | None
    every_seconds: float | None
    agree_every: int
    expects_events: bool
    """Whether one rank may know of an event that the others do not see: a signal, or the error of a background save."""

    def check(self) -> None:
        """Raise ValueError or TypeError if a number is not positive."""
        integer("agree_every", self.agree_every, least=1)
        if self.every_steps is not None:
            integer("every_steps", self.every_steps, least=1)
        if self.every_seconds is not None:
            number("every_seconds", self.every_seconds, above=0)

    def is_due(self, step: int) -> bool:
        """Return whether to save after `step`."""
        return self.every_steps is not None and step % self.every_steps == 0

    def is_late(self, seconds: float) -> bool:
        """Return whether to save when the last save was `seconds` ago."""
        return self.every_seconds is not None and seconds >= self.every_seconds

    def agrees(self, step: int) -> bool:
        """Return whether the ranks exchange events after `step`."""
        return (self.expects_events or self.every_seconds is not None) and step % self.agree_every == 0


# A thread that runs one job at a time: the writing of an asynchronous save.

logger = logging.getLogger("dualdist")


class Background:
    """Runs one job in a thread beside the caller. The interpreter waits for it before it ends."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        atexit.register(self._report)

    @property
    def failed(self) -> bool:
        """Whether the last job has ended with an exception that `finish` will raise."""
        return self._failure is not None

    def start(self, job: Callable[[], object]) -> None:
        """Start `job`. `finish` must have been called for the last one."""

        def run() -> None:
            try:
                job()
            except Exception as error:
                self._failure = error

        # Not a daemon: at exit, threading waits for it before it runs the functions registered with atexit.
        self._thread = threading.Thread(target=run, name="dualdist-checkpoint", daemon=False)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the job, if there is one, and raise its exception."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Do not report a failure at exit. `finish` must have been called for the last job."""
        atexit.unregister(self._report)

    def _report(self) -> None:
        if self._failure is not None:
            logger.error("The last checkpoint was not saved: %s", self._failure)


# Writing the checkpoints of a run on the writer, at once or in the background.


class Saver:
    """Writes numbered checkpoints into the folder of `catalog`, one at a time. All methods are local to the writer."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._copy = HostCopy()
        self.background = Background()

    def save(
        self, values: Mapping[str, Any], step: int, metrics: Mapping[str, float], *, in_background: bool
    ) -> None:
        """Write `values`. In the background: return when they are copied. The last save must have finished.

        Raises CheckpointError when they cannot be written. In the background, `background.finish` raises it.
        """
        manifest = make_manifest(step, metrics, self._catalog.next_serial)
        if in_background:
            copied = self._copy.take(values, "state")
            self.background.start(lambda: self._catalog.write(copied, manifest))
        else:
            self._catalog.write(on_host(values, "state"), manifest)


# Signals that announce the end of a job: recorded when they arrive, handled between two steps.


class Preempted(SystemExit):
    """The job was asked to end, and its state is saved. It ends the process with `exit_code`, unless it is caught."""

    def __init__(self, exit_code: int, signum: int) -> None:
        super().__init__(exit_code)
        self.number = signum
        """The signal."""


class SignalWatch:
    """Records the last of the signals `numbers` that this process received, instead of ending."""

    def __init__(self, numbers: Sequence[int]) -> None:
        """Install the handlers. Raises ValueError outside the main thread, where Python does not allow it."""
        if numbers and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "`signals` must be () outside the main thread, but are given. Make the manager in the main thread."
            )
        self.received = 0
        """The number of the received signal; 0: none."""
        self._previous: dict[int, Any] = {signum: signal.signal(signum, self._note) for signum in numbers}

    def restore(self) -> None:
        """Install the former handlers again."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received = signum


_RANDOM = "random"
EX_TEMPFAIL = 75
"""sysexits.h: "temporary failure; the user is invited to retry"."""


class CheckpointManager:
    """Saves a training run into a folder at intervals, and restores it from there.

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
    them, in the same order. An error of the writer is raised on every rank, and names the newest complete checkpoint.
    The run may catch it and continue: the next save tries again.

    Args:
        directory: made if it does not exist. It belongs to this run; two runs must not write into it at the same time.
        state: as for `checkpoint.save`. Restoring sets the plain values in it.
        keep: how many of the newest checkpoints to keep, besides the best. None: all.
        every_steps: save after every so many steps. every_seconds: save when so much time has passed since the last
            save, by rank 0's clock. None: do not.
        best: a metric and "max" or "min", such as ("val_accuracy", "max"): the best checkpoint by it is never removed.
        asynchronous: a save waits only until the state is copied to host memory, and writes it during the next steps.
            Its errors are raised by the next call. The next save waits for it. The writer holds one copy of the state.
        signals: signals that ask the run to end. The manager finishes the step, saves the state, and `step()` raises
            `Preempted`, a SystemExit, on every rank, also when only one rank received it. Needs the main thread.
        exit_code: that of `Preempted`; 75 means "try again". Configure the scheduler to restart the job on it;
            Slurm: RequeueExit=75.
        agree_every: exchange a few bytes after every so many steps, for signals, seconds and errors.
        random_state: also save the random number generators of every rank; see RandomState.
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
        """How many steps the run has made, including those before it was restored."""
        self._state = state

        def check() -> str:
            check_signals(signals)
            self._random = {_RANDOM: RandomState()} if flag("random_state", random_state) else {}
            expects_events = flag("asynchronous", asynchronous) or bool(signals)
            self._schedule = Schedule(every_steps, every_seconds, agree_every, expects_events)
            check_file_system(file_system)
            checked_path("directory", directory)
            return self._check(keep, best, asynchronous, exit_code)

        options = on_all_ranks(check, CheckpointError)
        if any(other != options[0] for other in options):
            raise ValueError(
                f"The options of a manager must be equal on all ranks, but are {options} instead."
            )
        self._catalog = Catalog(Path(directory), keep, best and Best(*best), file_system or FileSystem())
        from_writer(self._open)
        self._exit_code = exit_code
        self._watch = SignalWatch(signals)
        self._asynchronous = asynchronous
        self._saver = Saver(self._catalog)
        self._saved_step: int | None = None
        self._saved_at = time.monotonic()

    def step(self, metrics: Mapping[str, float] | None = None) -> bool:
        """Count a training step, save if a save is due, and return whether it was. Call it after each step.

        metrics: stored with the checkpoint, for `best`. Raises Preempted when a rank has received a signal,
        CheckpointError as `save` does, or when an asynchronous save has failed.
        """
        with reporting(call_kinds.ALLREDUCE):
            metrics = checked_metrics(metrics)
        self.steps += 1
        preempted, late, failed = self._agree() if self._schedule.agrees(self.steps) else (0, 0, 0)
        if failed:
            self._raise_failure(preempted)
        due = bool(late) or self._schedule.is_due(self.steps)
        if due or preempted:
            self._save(metrics, self._asynchronous and not preempted)
        if preempted:
            raise Preempted(self._exit_code, preempted)
        return due

    def save(self, metrics: Mapping[str, float] | None = None) -> None:
        """Save now, for example at the end of an epoch with its `metrics`. Replaces a checkpoint of the same step.

        Raises CheckpointError on every rank when this save, or the asynchronous one before it, has failed.
        """
        with reporting(call_kinds.GATHER_OBJECT):
            metrics = checked_metrics(metrics)
        self._save(metrics, self._asynchronous)

    def wait(self) -> None:
        """Wait for a running asynchronous save. Raises CheckpointError on every rank when it has failed."""
        if self._asynchronous:
            from_writer(self._saver.background.finish)

    def restore_latest(self, *, strict: bool = True) -> Manifest | None:
        """Load the checkpoint that was saved last, and return its manifest; None when there is none yet.

        Rank 0 chooses it. Files that are damaged, or that cannot be loaded without running code in them, are skipped
        with a warning that names them. strict: as for `checkpoint.load`. Raises DamagedCheckpointError when all files
        are damaged, CheckpointError when the chosen one does not fit.
        """
        return self._restore(lambda file: self._choose(self._catalog.newest_first, file), strict)

    def restore_best(self, *, strict: bool = True) -> Manifest | None:
        """Load the best checkpoint; return None when none has the metric. Otherwise as `restore_latest`."""
        return self._restore(lambda file: self._choose(self._catalog.best_first, file), strict)

    def restore(self, path: str | os.PathLike[str], *, strict: bool = True) -> None:
        """Load the checkpoint `path`, inside or outside the folder, and continue to count from its step.

        Checkpoints saved later count as newer than all in the folder. Errors as for `checkpoint.load`.
        """

        def choose(file: MemoryFile) -> Entry:
            checked = checked_path("path", path)
            return Entry(checked, read_file(checked, file))

        self._restore(choose, strict)
        self._saved_step = None

    def close(self) -> None:
        """Finish a running save, and install the former signal handlers. Raises CheckpointError as `wait` does."""
        self._watch.restore()
        try:
            self.wait()
        finally:
            self._saver.background.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not isinstance(error, Preempted):
            # After Preempted the handlers stay: the launcher may send the signal again while this process ends. After
            # other errors the ranks may be out of step, so nothing collective runs: a running save ends by itself.
            self._watch.restore()

    def _check(
        self, keep: int | None, best: tuple[str, str] | None, asynchronous: bool, exit_code: int
    ) -> str:
        """Raise ValueError or TypeError for a wrong option, and return the options that must be equal on all ranks."""
        check_state(self._state)
        self._schedule.check()
        if self._random and _RANDOM in self._state:
            raise ValueError(
                f"`state` must not have the name {_RANDOM!r}, which the manager uses. Pass random_state=False."
            )
        if keep is not None and integer("keep", keep) < 1:
            raise ValueError(f"`keep` must be at least 1 or None, but is {keep} instead.")
        if best is not None and (
            not isinstance(best, tuple | list)
            or len(best) != 2
            or not isinstance(best[0], str)
            or best[1] not in ("max", "min")
        ):
            raise ValueError(f"`best` must be a metric and 'max' or 'min', but is {best!r} instead.")
        if not 0 <= integer("exit_code", exit_code) < 256:
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
            # The save for the signal must still run.
            logger.error("%s", error)

    def _agree(self) -> list[int]:
        late = is_writer() and self._schedule.is_late(time.monotonic() - self._saved_at)
        events = torch.tensor([self._watch.received, late, self._saver.background.failed])
        highest: list[int] = allreduce(events, op=Max, name=None).tolist()
        return highest

    def _save(self, metrics: Mapping[str, float], asynchronous: bool) -> None:
        self.wait()
        if not metrics and self._saved_step == self.steps:
            return
        everything = self._everything()
        own = gather_own(everything)
        self._saved_at = time.monotonic()
        from_writer(
            lambda: self._saver.save(
                collect(everything, own), self.steps, metrics, in_background=asynchronous
            )
        )
        self._saved_step = self.steps

    def _everything(self) -> Mapping[str, Any]:
        # Restoring sets values in the first mapping.
        return ChainMap(self._state, self._random)  # type: ignore[arg-type]

    def _choose(self, candidates: Callable[[], Iterable[Entry]], file: MemoryFile) -> Entry | None:
        damaged = self._catalog.read()
        entries = list(candidates())
        chosen = first_undamaged(entries, damaged, file)
        if chosen is not None:
            self._catalog.pass_over(entries[: entries.index(chosen)])
        return chosen

    def _restore(self, choose: Callable[[MemoryFile], Entry | None], strict: bool) -> Manifest | None:
        with reporting(call_kinds.BROADCAST_OBJECT):
            strict = checked_strict(strict)
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
