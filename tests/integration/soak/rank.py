"""One rank of a run: trains, meets its fault, and reports how it ended.

python -m tests.integration.soak.rank

The environment has the fault (FAULT, JSON), the socket of the soak (REPORTS), the folder of the checkpoints
(CHECKPOINTS), and in a world without a launcher the arguments of `init` (INIT, JSON).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch

import dualdist as hvd
from dualdist.checkpoint import CheckpointManager, Preempted

from ...helpers.faulty_file_system import CountingFileSystem
from .calls import call_in_threads, call_some, call_wrongly, check
from .damage import damage_checkpoints, save_on_full_disk
from .faults import BACKWARD, CALL, INIT, SAVE, SHUTDOWN, START, STEPS, Fault
from .strike import Strike

RATE = MOMENTUM = 0.5
"""Powers of two, so that all numbers are exact, in whichever order they are added."""
SHAPES = (3, 2000, 70, 30_000, 1)


class Reports:
    """Sends to the soak what happens to this rank."""

    def __init__(self) -> None:
        self._connection = Client(os.environ["REPORTS"])
        self._lock = threading.Lock()

    def send(self, *message: object) -> None:
        with self._lock:
            self._connection.send(message)

    def await_release(self) -> None:
        """Wait until the soak allows this rank to end."""
        with contextlib.suppress(EOFError, OSError):
            self._connection.recv()


def weight_after(steps: int, size: int) -> float:
    weight = velocity = 0.0
    for step in range(steps):
        velocity = MOMENTUM * velocity + sum((step + 1) * (rank + 1) for rank in range(size))
        weight -= RATE * velocity
    return weight


def train(fault: Fault, strike: Strike, folder: Path) -> None:
    """Resume from `folder`, train, and check all numbers."""
    weights = [torch.nn.Parameter(torch.zeros(length, dtype=torch.float64)) for length in SHAPES]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, RATE, momentum=MOMENTUM), op=hvd.Sum)
    state = {"weights": torch.nn.ParameterList(weights), "optimizer": optimizer}
    saving = CountingFileSystem(lambda count, name: strike.in_save())
    with (
        saving.in_use(),
        CheckpointManager(folder, state, keep=2, every_steps=2, asynchronous=fault.asynchronous) as manager,
    ):
        manager.restore_latest()
        while manager.steps < STEPS:
            step = manager.steps
            with strike.at(CALL, step):
                call_some(random.Random(f"{fault.seed} {step}"))
            if step == fault.step and fault.kind == "wrong arguments":
                call_wrongly(hvd.rank() == fault.rank, fault.seed)
            if step == fault.step and fault.kind == "damaged checkpoint":
                damage_checkpoints(folder.parent / "damaged.pt", fault.seed)
            if step == fault.step and fault.kind == "full disk":
                save_on_full_disk(folder.parent / "full.pt", fault.rank)
            if step == fault.step and fault.kind == "threads":
                call_in_threads()
            optimizer.zero_grad()
            with strike.at(BACKWARD, step):
                slope = float((step + 1) * (hvd.rank() + 1))
                torch.stack([(slope * weight).sum() for weight in weights]).sum().backward()
            optimizer.step()
            with strike.at(SAVE, step):
                manager.step()
    found = {number for weight in weights for number in weight.tolist()}
    check(found, {weight_after(STEPS, hvd.size())}, "weights")


def run(fault: Fault, strike_of: Callable[[int], Strike]) -> None:
    given: dict[str, Any] = json.loads(os.environ.get("INIT", "{}"))
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "DUALDIST_RANK")
    rank = given.get("rank", next((int(os.environ[name]) for name in names if name in os.environ), 0))
    strike = strike_of(rank)
    with strike.at(START):
        pass
    with strike.at(INIT):
        hvd.init(**given)
    check(hvd.rank(), rank, "rank")
    train(fault, strike, Path(os.environ["CHECKPOINTS"]))
    with strike.at(SHUTDOWN):
        hvd.shutdown()


def main() -> int:
    fault, reports = Fault.from_json(os.environ["FAULT"]), Reports()
    reports.send("pid", os.getpid())
    try:
        run(fault, lambda rank: Strike(fault, rank, reports.send))
    except Preempted as error:
        reports.send("preempted", "")
        return int(error.code or 0)
    except (hvd.HorovodInternalError, hvd.ConfigurationError, hvd.CheckpointError) as error:
        reports.send("error", f"{type(error).__name__}: {error}")
        reports.await_release()
        return 1
    except BaseException as error:
        reports.send("other", repr(error))
        raise
    reports.send("done", "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
