"""CheckpointManager: when to save, which checkpoints to keep, how to resume, and how to end on a signal."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import time
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch

from ..core import needed
from ..core.checks import flag, integer, number, wrong
from ..core.checks import path as checked_path
from ..core.collectives.allreduce import ALLREDUCE, allreduce
from ..core.collectives.objects import ALLGATHER_OBJECT, on_all_ranks
from ..core.process import at_exit
from ..core.types import Max
from ..core.world import reporting
from ..errors import CheckpointError, DamagedCheckpointError, logger
from .catalog import Catalog, Find
from .contents import HostCopy, check_state, few, on_host
from .format import Manifest, make_manifest
from .save_and_load import (
    RandomState,
    checked_metrics,
    from_writer,
    is_writer,
    load_into,
    outcomes,
    read_into,
    receive_checkpoint,
    write_state,
)
from .signals import SignalWatch, check_signals


class Preempted(SystemExit):
    """The job was asked to end, and its state is saved. It ends the process with `exit_code`, unless it is caught."""

    def __init__(self, exit_code: int, signum: int) -> None:
        super().__init__(exit_code)
        self.number = signum
        """The signal."""


_RANDOM = "random"
EX_TEMPFAIL = 75
"""sysexits.h: "temporary failure; the user is invited to retry"."""


class CheckpointManager:
    """Saves a training run into a folder at intervals, and restores it from there.

        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler, "epochs": 0}
        with hvd.checkpoint.CheckpointManager("checkpoints", state, every_steps=500) as manager:
            manager.restore_latest()
            for epoch in range(state["epochs"], epochs):
                sampler.set_epoch(epoch)
                for images, labels in loader:
                    ...
                    sampler.advance(len(images))
                    manager.step()
                state["epochs"] = epoch + 1
            manager.save()

    Rank 0 writes and reads; the others need not see the folder. All methods are collective. An error of the writer is
    raised on every rank, and names the newest complete checkpoint. After it, the next save tries again.

    Args:
        directory: made if it does not exist. It belongs to this run: after the first save of another job there, the
            next save of this one is an error.
        state: as for `checkpoint.save`. Restoring sets the plain values in it.
        keep: how many of the newest checkpoints to keep, besides the `keep_best` best ones. None: all.
        every_steps: save after every so many steps. every_seconds: save when so much time has passed since the last
            save, by rank 0's clock. None: do not.
        best: a metric and "max" or "min", such as ("val_accuracy", "max"): the best checkpoint by it is never removed.
        keep_best: how many of the best ones are not removed. Of equal ones, the later is better.
        asynchronous: a save waits only until the state is copied to host memory, and writes it during the next steps.
            Its errors are raised by the next call. The next save waits for it. The writer holds one copy of the state.
        signals: signals that ask the run to end. The manager finishes the step, saves the state, and `step()` raises
            `Preempted`, a SystemExit, on every rank, also when only one rank received it. Needs the main thread.
        exit_code: that of `Preempted`; 75 means "try again". Configure the scheduler to restart the job on it;
            Slurm: RequeueExit=75.
        agree_every: every so many steps, the ranks exchange whether a signal came, time is up or a save failed.
        random_state: also save the random number generators of every rank; see RandomState.
        sharded: for models that fully_shard or parallelize_module has changed: every rank writes and reads its part of
            the models and optimizers, into a folder per checkpoint that torch.distributed.checkpoint loads, too. The
            file system must be shared by all ranks. Only load folders that you trust: their metadata are a pickle.

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
        keep_best: int = 1,
        asynchronous: bool = False,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        exit_code: int = EX_TEMPFAIL,
        agree_every: int = 1,
        random_state: bool = True,
        sharded: bool = False,
    ) -> None:
        self.steps = 0
        """How many steps the run has made, including those before it was restored."""
        self._state = state
        self._random: dict[str, RandomState] = {}

        def check() -> dict[str, Any]:
            """Check the options, and return those that must be equal on all ranks."""
            checked_path("directory", directory)
            check_signals(signals)
            if keep is not None and integer("keep", keep) < 1:
                raise ValueError(f"`keep` must be at least 1 or None, but is {keep} instead.")
            if every_steps is not None:
                integer("every_steps", every_steps, least=1)
            if every_seconds is not None:
                number("every_seconds", every_seconds, above=0)
            integer("agree_every", agree_every, least=1)
            is_pair = isinstance(best, tuple | list) and len(best) == 2
            if best is not None and not (is_pair and isinstance(best[0], str) and best[1] in ("max", "min")):
                raise ValueError(f"`best` must be a metric and 'max' or 'min', but is {best!r} instead.")
            if integer("keep_best", keep_best, least=1) > 1 and best is None:
                raise wrong("keep_best", "1 without `best`", keep_best, "Pass the metric as `best`.")
            integer("exit_code", exit_code, least=0, below=256)
            names = check_state(state)
            if flag("random_state", random_state):
                if _RANDOM in names:
                    raise ValueError(
                        f"`state` must not have the name {_RANDOM!r}, which the manager uses. Pass random_state=False."
                    )
                self._random = {_RANDOM: RandomState()}
            if flag("sharded", sharded):
                needed("sharding").check_part_names(state)
            return {
                "every_steps": every_steps,
                "every_seconds": every_seconds,
                "agree_every": agree_every,
                "asynchronous": flag("asynchronous", asynchronous),
                "handles signals": bool(signals),
                "exit_code": exit_code,
                "sharded": sharded,
                "state": sorted([*names, *self._random]),
            }

        options = on_all_ranks(check, CheckpointError)
        if any(other != options[0] for other in options):
            raise ValueError(f"The options of a manager must be equal on all ranks, but are {options} instead.")
        self._every_steps, self._every_seconds, self._agree_every = every_steps, every_seconds, agree_every
        self._asynchronous, self._exit_code = asynchronous, exit_code
        self._agrees = asynchronous or bool(signals) or every_seconds is not None
        """Whether one rank may know of an event that the others do not see: a signal, a failed save, a late one."""
        rated = best and (*best, keep_best)
        sharding = needed("sharding") if sharded else None
        kind = Catalog if sharding is None else sharding.FolderCatalog
        self._catalog: Catalog = kind(Path(directory), keep, rated)
        from_writer(self._open)
        self._shards: Any = sharding and sharding.Shards(state, self._catalog)
        self._signals = SignalWatch(signals)
        self._saved_step: int | None = None
        self._saved_at = time.monotonic()
        self._copy = HostCopy()
        # The interpreter waits for its thread before it calls the functions registered with atexit.
        self._background = ThreadPoolExecutor(1, "dualdist-checkpoint")
        self._saving: Future[None] | None = None
        """The asynchronous save whose error has not been raised yet."""
        self._at_exit = at_exit(self._report_failure)

    def step(self, metrics: Mapping[str, float] | None = None) -> bool:
        """Count a training step, save if a save is due, and return whether it was. Call it after each step.

        metrics: stored with the checkpoint, for `best`. Raises Preempted when a rank has received a signal,
        CheckpointError as `save` does, or when an asynchronous save has failed.
        """
        with reporting(ALLREDUCE):
            metrics = checked_metrics(metrics)
        self.steps += 1
        agrees = self._agrees and self.steps % self._agree_every == 0
        preempted, late, failed = self._agree() if agrees else (0, 0, 0)
        if failed:
            try:
                self.wait()
            except CheckpointError as error:
                if not preempted:
                    raise
                logger.error("%s", error)  # the save for the signal must still run
        due = bool(late) or (self._every_steps is not None and self.steps % self._every_steps == 0)
        if due or preempted:
            self._save(metrics, self._asynchronous and not preempted)
        if preempted:
            if is_writer():
                logger.warning(
                    "Signal %d (%s) ended the run after step %d, which is saved. Its exit code is %d.",
                    preempted,
                    signal.strsignal(preempted),
                    self.steps,
                    self._exit_code,
                )
            self._signals.release()
            raise Preempted(self._exit_code, preempted)
        return due

    def save(self, metrics: Mapping[str, float] | None = None) -> None:
        """Save now, for example at the end of an epoch with its `metrics`. Replaces a checkpoint of the same step.

        A metric that is NaN never replaces a number: then the older checkpoint stays, with a warning.

        Raises CheckpointError on every rank when this save, or the asynchronous one before it, has failed.
        """
        with reporting(ALLGATHER_OBJECT):
            metrics = checked_metrics(metrics)
        self._save(metrics, self._asynchronous)

    def wait(self) -> None:
        """Wait for a running asynchronous save. Raises CheckpointError on every rank when it has failed."""
        if not self._asynchronous:
            return
        saving, self._saving = self._saving, None
        try:
            outcomes(None if saving is None else saving.result)
        except CheckpointError:
            self._saved_step = None  # the next save tries again
            raise

    def restore_latest(self, *, strict: bool = True, partial: bool = False) -> Manifest | None:
        """Load the checkpoint that was saved last, and return its manifest; None when there is none yet.

        Rank 0 chooses it. Files that are damaged, or that cannot be loaded without running code in them, are skipped
        with a warning that names them. strict, partial: as for `checkpoint.load`. Raises DamagedCheckpointError when
        all files are damaged, CheckpointError when the chosen one does not fit.
        """
        return self._restore(self._catalog.find, strict, partial)

    def restore_best(self, *, strict: bool = True, partial: bool = False) -> Manifest | None:
        """Load the best checkpoint; return None when none has the metric. Otherwise as `restore_latest`."""
        return self._restore(lambda file: self._catalog.find(file, best=True), strict, partial)

    def restore(self, path: str | os.PathLike[str], *, strict: bool = True, partial: bool = False) -> None:
        """Load the checkpoint `path`, inside or outside the folder, and continue to count from its step.

        Checkpoints saved later count as newer than all in the folder. Errors as for `checkpoint.load`. With `sharded`,
        it may be a folder of torch.distributed.checkpoint that another program has written; `steps` then stays.
        """
        if self._shards is not None and from_writer(lambda: self._shards.is_foreign(path)):
            self.wait()
            self._shards.fit(Path(path), strict=strict, partial=partial)()
        else:
            find = functools.partial(read_into, path, file_of=self._catalog.file_of)
            self._restore(find, strict, partial, skips=False)
        self._saved_step = None

    def close(self) -> None:
        """Finish a running save, and install the former signal handlers. Raises CheckpointError as `wait` does."""
        self._signals.end()
        try:
            self.wait()
        finally:
            atexit.unregister(self._at_exit)
            if self._shards is not None:
                self._shards.close()

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
            if signum := self._signals.received:
                ended = [child.name for child in self._signals.started_before if not child.is_alive()]
                logger.error(
                    "This rank failed before the save for signal %d (%s), so its last steps are not saved.%s",
                    signum,
                    signal.strsignal(signum),
                    f" {few(ended)} started before the manager was made, so the signal may have ended what the rank "
                    "needs. Make the manager first." * bool(ended),
                )
            self._signals.end()

    def _open(self) -> None:
        try:
            self._catalog.open()
        except OSError as error:
            raise CheckpointError(f"`directory` must be a folder that can be used, but {error}.") from error

    def _agree(self) -> list[int]:
        """Return the highest signal of all ranks, whether a save is late, and whether an asynchronous one failed."""
        seconds = time.monotonic() - self._saved_at
        late = is_writer() and self._every_seconds is not None and seconds >= self._every_seconds
        events = torch.tensor([self._signals.received, late, self._failure() is not None], device="cpu")
        highest: list[int] = allreduce(events, op=Max, name=None).tolist()
        return highest

    def _save(self, metrics: Mapping[str, float], asynchronous: bool) -> None:
        self.wait()
        if not metrics and self._saved_step == self.steps:
            return
        self._saved_at = time.monotonic()
        collected: list[Any] = []
        """On the writer: the values to write, and their manifest."""

        def collect(values: Mapping[str, Any]) -> bool:
            self._catalog.claim()
            if lost := self._catalog.would_lose(self.steps, metrics):
                logger.warning(
                    "The checkpoint of step %d was not replaced: %s is a number there, but NaN now. Was it computed of "
                    "no batches?",
                    self.steps,
                    few(lost),
                )
                return False
            collected.append(self._copy.take(values, "state") if asynchronous else on_host(values, "state"))
            collected.append(make_manifest(self.steps, metrics, self._catalog.next_serial))
            if self._shards is None:
                self._write(asynchronous, self._catalog.write, *collected)
            return True

        if write_state(self._everything(), collect) and self._shards is not None:
            finish = self._shards.write(self.steps, asynchronous=asynchronous)
            self._write(asynchronous, finish, *(collected or (None, None)))
        self._saved_step = self.steps

    def _write(self, asynchronous: bool, function: Callable[..., None], *arguments: Any) -> None:
        if asynchronous:
            self._saving = self._background.submit(function, *arguments)
        else:
            function(*arguments)

    def _failure(self) -> BaseException | None:
        """Return the error of the asynchronous save, None if it is still running. Local."""
        return self._saving.exception() if self._saving is not None and self._saving.done() else None

    def _report_failure(self) -> None:
        if failure := self._failure():
            logger.error("The last checkpoint was not saved: %s", failure)

    def _everything(self) -> ChainMap[str, Any]:
        """Return all that is not saved in parts. Restoring sets plain values in the first mapping, which is empty."""
        state: Any = self._state if self._shards is None else self._shards.others
        return ChainMap({}, state, self._random)

    def _restore(self, find: Find, strict: bool, partial: bool, skips: bool = True) -> Manifest | None:
        with reporting(ALLGATHER_OBJECT):
            strict, partial = flag("strict", strict), flag("partial", partial)
        shards = self._shards
        self.wait()
        while (found := receive_checkpoint(find if is_writer() else None)) is not None:
            _, entry, values = found
            problem = None if shards is None else shards.verify(entry.path, values)
            if problem is None:
                break
            if not skips:
                raise DamagedCheckpointError(problem)
            self._catalog.rejected[entry.path] = problem
        else:
            return None
        load_parts = None if shards is None else shards.fit(entry.path, strict=strict, partial=partial)
        everything = self._everything()
        load_into(everything, values, strict=strict, partial=partial, origin=entry.path)
        if plain := everything.maps[0]:
            cast("MutableMapping[str, Any]", self._state).update(plain)
        if load_parts is not None:
            load_parts()
        self.steps = self._saved_step = entry.manifest.step or 0
        return entry.manifest
