"""Runs with sharded models of which one rank is killed while they save, and what the runs that resume from them make.

    python -m tests.helpers.killed_shards FOLDER COUNT SEED

prints one JSON object per run. Each rank is a fork of this process.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp  # noqa: F401

import dualdist as hvd
from dualdist.checkpoint import CheckpointManager

from .killed_runs import SharedNumbers, forked
from .sharded_training import adamw, shard, train, transformer, weights

EVERY, STEPS, RANKS = 2, 6, 2


@dataclass(frozen=True)
class Run:
    """The result of a run of which a rank was killed, and of the run that resumed from it."""

    asynchronous: bool
    victim: int
    ended: list[int]
    """The exit codes of the ranks, or minus the signal."""
    restored: int
    """The step from which the second run resumed, on `ranks` ranks."""
    ranks: int
    difference: float
    """The largest of its weights from those of an undisturbed run."""
    left: list[str]
    """What is in the folder at the end."""


def run(folder: Path, asynchronous: bool, watch: Callable[[CheckpointManager], None]) -> tuple[int, list[float]]:
    """Resume, train to the end, and return the step from which this run has resumed, and its weights."""
    model = transformer()
    shard(model, hvd.device_mesh())
    state = {"model": model, "optimizer": adamw(model.parameters())}
    options: dict[str, Any] = {"every_steps": EVERY, "signals": (), "asynchronous": asynchronous}
    with CheckpointManager(folder, state, keep=2, sharded=True, **options) as manager:
        manager.restore_latest()
        restored = manager.steps
        watch(manager)
        for number in range(restored, STEPS):
            train(model, state["optimizer"], steps=number + 1, first=number)  # every rank on the whole batches
            manager.step()
    sys.setprofile(None)
    return restored, weights(model)


def joined(ranks: int, meeting: Path, body: Callable[[], object]) -> list[int]:
    """Run `body` on each rank of a world, and return their exit codes, or minus the signals."""

    def child(rank: int) -> int:
        try:
            hvd.init(init_method=f"file://{meeting}", rank=rank, world_size=ranks, backend="torch", timeout=20)
            body()
        except (hvd.HorovodInternalError, RuntimeError) as error:
            if isinstance(error, hvd.HorovodInternalError) and "rank" in str(error):
                return 3
            # torch's own collectives, in the model, raise c10d's errors.
            if not re.search("torch/distributed/(fsdp|tensor)/", "".join(traceback.format_exception(error))):
                traceback.print_exc()
            return 4
        return 0

    return forked(*(functools.partial(child, rank) for rank in range(ranks)))


def counting(at: Callable[[int], None]) -> Callable[[CheckpointManager], None]:
    """Return what calls `at` with the number of each call of a function, in all threads, while the manager saves."""
    numbers = itertools.count(1)

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            at(next(numbers))

    def watch(manager: CheckpointManager) -> None:
        step = manager.step

        def watched(*arguments: Any) -> bool:
            sys.setprofile(note)
            try:
                return step(*arguments)
            finally:
                sys.setprofile(None)

        manager.step = watched  # type: ignore[method-assign, assignment]
        threading.setprofile(note)  # of those that start now, such as that of an asynchronous save

    return watch


def undisturbed(folder: Path, asynchronous: bool) -> tuple[Sequence[int], Path]:
    """Return the number of calls on each rank of a run that is not killed, and a file with its weights."""
    shared, path = SharedNumbers(), folder / "weights"
    folder.mkdir()

    def body() -> None:
        watch = counting(lambda number: shared.set(hvd.rank(), number))
        _, found = run(folder / "saved", asynchronous, watch)
        if hvd.rank() == 0:
            path.write_text(json.dumps(found))

    assert joined(RANKS, folder / "meeting", body) == [0] * RANKS
    return [int(shared.get(rank)) for rank in range(RANKS)], path


def killed(folder: Path, numbers: random.Random, asynchronous: bool, calls: Sequence[int], expected: Path) -> Run:
    folder.mkdir()
    victim, ranks, shared = numbers.randrange(RANKS), numbers.choice((RANKS, RANKS, 1, 3)), SharedNumbers()
    moment = numbers.randint(1, calls[victim])

    def kill(number: int) -> None:
        if number == moment and hvd.rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    ended = joined(RANKS, folder / "meeting", lambda: run(folder / "saved", asynchronous, counting(kill)))

    def again() -> None:
        restored, found = run(folder / "saved", asynchronous, lambda manager: None)
        pairs = zip(found, json.loads(expected.read_text()), strict=True)
        if hvd.rank() == 0:
            shared.set(0, restored)
            shared.set(1, max(abs(one - other) for one, other in pairs))

    assert joined(ranks, folder / "meeting again", again) == [0] * ranks
    left = sorted(path.name for path in (folder / "saved").glob("*step-*"))
    return Run(asynchronous, victim, ended, int(shared.get(0)), ranks, shared.get(1), left)


def main(folder: Path, count: int, seed: int) -> None:
    numbers = random.Random(seed)
    adamw(transformer().parameters())  # imports torch's compiler, once for all forks
    kinds = {kind: undisturbed(folder / f"undisturbed {kind}", kind) for kind in (False, True)}
    for place in range(count):
        asynchronous = place % 2 == 1
        print(json.dumps(asdict(killed(folder / str(place), numbers, asynchronous, *kinds[asynchronous]))), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
