"""Worlds of which one rank dies at a random moment, and what the other ranks say of it.

    python -m tests.helpers.deaths COUNT SEED [KIND ...]

prints one JSON object per death, and at the end how many were right.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import dualdist as hvd

from .forks import forked, use_forks
from .world import MPIRUN, ROOT

KINDS: Mapping[str, Mapping[str, str]] = {
    "torch-gloo": {"DUALDIST_BACKEND": "torch", "DUALDIST_TRANSPORT": "gloo"},
    "torch-mpi": {"DUALDIST_BACKEND": "torch", "DUALDIST_TRANSPORT": "mpi"},
    "horovod-gloo": {"DUALDIST_BACKEND": "horovod", "DUALDIST_TRANSPORT": "gloo"},
    "horovod-mpi": {"DUALDIST_BACKEND": "horovod", "DUALDIST_TRANSPORT": "mpi"},
}
"""The environment of each kind of world."""
WAYS = ("SIGKILL", "_exit", "sys.exit", "an exception")
MOST_SECONDS, END_SECONDS = 0.3, 60.0
"""After its start, a rank dies at the latest; after it, all others have ended."""
_CAUSE = re.compile(r"the cause is rank (\d+)\..*missing ranks: (\[.*?\])\.", re.DOTALL)


@dataclass(frozen=True)
class Death:
    """What the world of `size` ranks did when the rank `victim` died."""

    kind: str
    size: int
    victim: int
    way: str
    blamed: Mapping[int, Sequence[str]]
    """Each rank that has raised -> the cause and the missing ranks, or else its error."""
    left: int
    """How many processes had to be killed."""

    @property
    def is_right(self) -> bool:
        """Whether each of the others has named the victim and no other rank, and has ended."""
        others = set(range(self.size)) - {self.victim}
        expected = [str(self.victim), f"[{self.victim}]"]
        return self.left == 0 and self.blamed == dict.fromkeys(others, expected)


def deaths(count: int, seed: int, kinds: Sequence[str] = tuple(KINDS)) -> Iterator[Death]:
    """Yield `count` deaths, of the kinds in turn, in worlds of 2 to 4 ranks."""
    chooser = random.Random(seed)
    for kind in itertools.islice(itertools.cycle(kinds), count):
        size = chooser.randint(2, 4)
        victim, way = chooser.randrange(size), chooser.choice(WAYS)
        with tempfile.TemporaryDirectory() as folder:
            arguments = (folder, str(size), str(victim), way, str(chooser.randrange(1 << 30)))
            left = _run(kind, size, [sys.executable, "-m", "tests.helpers.deaths", "rank", *arguments])
            blamed = {int(file.name): json.loads(file.read_text()) for file in Path(folder).glob("[0-9]")}
        yield Death(kind, size, victim, way, blamed, left)


def _run(kind: str, size: int, command: Sequence[str]) -> int:
    """Run the ranks, and return how many processes had to be killed."""
    if kind.endswith("-mpi"):
        # With recovery, mpirun lets the others go on.
        commands = [[*(part.format(size=size) for part in MPIRUN), "--enable-recovery", *command, "-1"]]
    else:
        commands = [[*command, str(rank)] for rank in range(size)]
    variables = {**os.environ, **KINDS[kind], "OMP_NUM_THREADS": "1", "DUALDIST_LOG_LEVEL": "ERROR"}
    processes = [
        subprocess.Popen(
            forked(one),
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for one in commands
    ]
    deadline, left = time.monotonic() + END_SECONDS, 0
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            left += 1
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return left


def _die(way: str) -> None:
    if way == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(3)


def _rank(folder: str, size: int, victim: int, way: str, seed: int, rank: int) -> None:
    """Make random calls, the same on all ranks, until one of them raises."""
    if rank < 0:
        hvd.init()
    else:
        hvd.init(init_method=f"file://{folder}/store", rank=rank, world_size=size)
    model = torch.nn.Linear(100, 100)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    chooser, moments = random.Random(seed), random.Random(seed + 1)
    seconds = moments.uniform(0.0, MOST_SECONDS)
    end = time.monotonic() + seconds
    dies = hvd.rank() == victim
    if dies and way in ("SIGKILL", "_exit"):
        threading.Timer(seconds, _die, [way]).start()
    try:
        while True:
            if dies and way in ("sys.exit", "an exception") and time.monotonic() > end:
                if way == "sys.exit":
                    sys.exit(3)
                raise ValueError("an exception of the script")
            length = chooser.choice((1, 1000, 1_000_000))
            match chooser.randrange(6):
                case 0:
                    hvd.allreduce(torch.ones(length))
                case 1:
                    hvd.broadcast(torch.ones(length), chooser.randrange(size))
                case 2:
                    hvd.allgather(torch.ones(length))
                case 3:
                    hvd.synchronize(hvd.allreduce_async(torch.ones(length)))
                case 4:
                    optimizer.zero_grad()
                    model(torch.ones(2, 100)).sum().backward()
                    optimizer.step()
                case 5:
                    hvd.broadcast_object("an object", root_rank=0)
    except hvd.HorovodInternalError as error:
        found = _CAUSE.search(str(error))
        Path(folder, str(hvd.rank())).write_text(json.dumps(found.groups() if found else [str(error)]))
        raise


def main(arguments: Sequence[str]) -> None:
    use_forks(True)
    found = []
    for death in deaths(int(arguments[0]), int(arguments[1]), arguments[2:] or tuple(KINDS)):
        found.append(death.is_right)
        sys.stdout.write(json.dumps({**asdict(death), "is_right": death.is_right}) + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"{sum(found)} of {len(found)} right\n")


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        _rank(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], *map(int, sys.argv[6:]))
    else:
        main(sys.argv[1:])
