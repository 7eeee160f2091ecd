"""Runs that are killed with SIGKILL while they save, each in a fork of this process, and what they leave.

    python -m tests.helpers.killed_runs FOLDER COUNT SEED

prints one JSON object per run.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import random
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import dualdist as hvd
from dualdist.checkpoint import CheckpointManager

from .faulty_file_system import CountingFileSystem, FaultyFileSystem

EVERY, STEPS = 3, 12
ENDED, FAILED = 0, 3
"""Exit codes of a run that finished, and of one that ended with the error of a full or broken disk."""


@dataclass(frozen=True)
class Run:
    """The result of a killed run and of the run that resumed from it."""

    faulty: bool
    asynchronous: bool
    ended_by: str
    steps: int
    """The number of steps of the first run."""
    restored: int
    """The step from which the second run resumed."""
    same: bool
    """Whether the second run ended with the weights of an uninterrupted one."""
    left: list[str]
    """The files in the folder at the end."""


def train(
    folder: Path,
    disk: CountingFileSystem,
    count: Callable[[int], None],
    start: Callable[[int], None],
    asynchronous: bool = False,
) -> float:
    """Resume from the folder, train to the end, and return the sum of the weights."""
    hvd.init()
    weight = torch.nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    state: dict[str, Any] = {"optimizer": optimizer, "weight": weight}
    with (
        disk.in_use(),
        CheckpointManager(folder, state, keep=2, every_steps=EVERY, asynchronous=asynchronous) as manager,
    ):
        if manager.restore_latest() is not None:
            weight.data.copy_(state["weight"])
        start(manager.steps)
        while manager.steps < STEPS:
            optimizer.zero_grad()
            ((weight + torch.rand(100)) ** 2).sum().backward()
            optimizer.step()
            count(manager.steps + 1)
            manager.step()
    return float(weight.sum().item())


def forked(*bodies: Callable[[], int]) -> list[int]:
    """Run each of `bodies` in a fork, and return the exit codes that they return, or minus the signals."""
    pids = []
    for body in bodies:
        pids.append(os.fork())
        if pids[-1] == 0:
            code = 1
            try:
                code = body()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


class SharedNumbers:
    """Numbers in memory that a fork shares with this process."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 32)

    def set(self, place: int, value: float) -> None:
        struct.pack_into("d", self._memory, 8 * place, value)

    def get(self, place: int) -> float:
        return float(struct.unpack_from("d", self._memory, 8 * place)[0])


def seeded() -> None:
    torch.manual_seed(0)


def undisturbed(folder: Path) -> tuple[float, int]:
    """Return the sum of the weights of an uninterrupted run, and the number of its file system operations."""
    shared, counting = SharedNumbers(), CountingFileSystem()

    def body() -> int:
        seeded()
        shared.set(0, train(folder, counting, lambda step: None, lambda step: None))
        shared.set(1, counting.count)
        return ENDED

    assert forked(body) == [ENDED]
    return shared.get(0), int(shared.get(1))


def killed(
    folder: Path, numbers: random.Random, faulty: bool, asynchronous: bool, operations: int, expected: float
) -> Run:
    """Kill a run at an operation that `numbers` chooses, resume from its files, and return the result."""
    shared, moment = SharedNumbers(), numbers.randint(2, operations * (2 if faulty else 1))
    fails_at = numbers.randint(2, 2 * operations) if faulty and numbers.random() < 0.5 else 0

    def kill(count: int, name: str) -> None:
        if count == moment:
            if isinstance(disk, FaultyFileSystem):
                disk.lose_power()
            os.kill(os.getpid(), signal.SIGKILL)

    disk = FaultyFileSystem(kill, fails_at=fails_at, delay=1e-4) if faulty else CountingFileSystem(kill)

    def first() -> int:
        seeded()
        try:
            train(folder, disk, functools.partial(shared.set, 0), lambda step: None, asynchronous)
        except hvd.CheckpointError:
            return FAILED
        return ENDED

    def second() -> int:
        seeded()
        start = functools.partial(shared.set, 1)
        shared.set(2, train(folder, CountingFileSystem(), lambda step: None, start, asynchronous))
        return ENDED

    (code,) = forked(first)
    ended_by = signal.Signals(-code).name if code < 0 else {FAILED: "an error"}.get(code, f"exit code {code}")
    assert forked(second) == [ENDED]
    names = sorted(path.name for path in folder.glob("*step-*"))
    steps, restored = int(shared.get(0)), int(shared.get(1))
    return Run(faulty, asynchronous, ended_by, steps, restored, shared.get(2) == expected, names)


def main(folder: Path, count: int, seed: int) -> None:
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports the compiler once here, not in every fork
    numbers = random.Random(seed)
    expected, operations = undisturbed(folder / "undisturbed")
    for place in range(count):
        run = killed(folder / str(place), numbers, place % 2 == 1, place % 4 > 1, operations, expected)
        print(json.dumps(asdict(run)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
