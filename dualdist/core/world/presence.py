"""What ranks compare and tell each other when they have joined a world: numbers, and what each has where it runs."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...errors import WorldMismatchError, logger
from .. import accelerator
from ..backends.base import Backend
from ..launch import DeviceView, choose_devices
from ..launch.environment import add_copies, remove_copies
from ..meeting.addresses import own_node
from ..types import Launch

# Warns when the processes of a host start more threads than it has CPUs, which can make training several times slower.
#
# torchrun, `dualdist run` and `spawn` set OMP_NUM_THREADS. mpirun, srun and horovodrun do not, so each of their
# processes starts one thread per CPU.


class CpuThreads(NamedTuple):
    """The threads of a process, and the CPUs that it may use."""

    threads: int
    cpus: int
    first_cpu: int
    """The lowest number among the CPUs. Processes that are bound to other CPUs differ in it."""

    @classmethod
    def of_this_process(cls) -> CpuThreads:
        """Return those of this process. The number of threads is 0 if the user has set OMP_NUM_THREADS."""
        cpus = os.sched_getaffinity(0)
        threads = 0 if os.environ.get("OMP_NUM_THREADS") else torch.get_num_threads()
        return cls(threads, len(cpus), min(cpus))


def warn_of_too_many_threads(processes: Iterable[tuple[str, CpuThreads]]) -> None:
    """Log one warning if, on a host, processes that share CPUs have more threads than CPUs. Local.

    processes: the host, as `own_node` names it, and the threads of every process.
    """
    for (host, mine), count in Counter(processes).items():
        if count > 1 and mine.threads * count > mine.cpus:
            best = max(1, mine.cpus // count)
            logger.warning(
                "On %s, %d processes with %d threads each share %d CPUs. This can make training several times slower. "
                "Set OMP_NUM_THREADS=%d for all processes (with Open MPI: mpirun -x OMP_NUM_THREADS=%d).",
                *(host.rpartition("-")[0], count, mine.threads, mine.cpus, best, best),
            )
            return


# What each rank reports about itself when it has joined a world.


@dataclass(frozen=True)
class Presence:
    """Where a rank runs, and what it has there."""

    host: str
    local_rank: int | None
    contact: Any
    """Of its `Observation`."""
    threads: CpuThreads
    devices: tuple[str, int]
    """A name for the set of devices that the rank sees, and their number."""
    master: tuple[str, int] | None
    """On rank 0: its address, and a port that is free on its host."""

    @classmethod
    def of_this_process(
        cls, local_rank: int | None, contact: Any, master: tuple[str, int] | None
    ) -> Presence:
        """Return the report of this process."""
        names = accelerator.visible()
        devices = hashlib.sha256(repr(names).encode()).hexdigest()[:8], len(names)
        return cls(own_node(), local_rank, contact, CpuThreads.of_this_process(), devices, master)

    @property
    def view(self) -> DeviceView:
        """What is needed to choose the rank's device."""
        name, count = self.devices
        return DeviceView(self.host, self.local_rank, [f"{name}.{index}" for index in range(count)])


def check_numbers(launched: Launch, joined: Backend) -> None:
    """Raise WorldMismatchError if the backend has joined another world than the launcher has started. Local."""
    has_numbers = launched.by_launcher and not launched.elastic
    if has_numbers and (launched.size, launched.rank) != (joined.size, joined.rank):
        what, field = ("Rank", "rank") if launched.size == joined.size else ("World size", "size")
        raise WorldMismatchError(
            f"{what} must be the {launched.describe(field)} that {launched.launcher} has set, but is "
            f"{getattr(joined, field)} instead in {joined.name}. This process is rank {joined.rank} of "
            f"{joined.size} there and should be rank {launched.describe('rank')} of {launched.size}. "
            "Do not start the backend before dualdist.init(), or start it with all ranks. Start MPI with the "
            "mpirun of the library that the backend was built for."
        )


def device_of(rank: int, views: Sequence[DeviceView]) -> torch.device:
    """Return the device of `rank`, from what each rank sees; the CPU if there is none. Local."""
    index = choose_devices(views)[rank]
    return torch.device("cpu") if index is None else torch.device(str(accelerator.kind()), index)


@contextlib.contextmanager
def exported(variables: Mapping[str, str]) -> Iterator[None]:
    """Set those of `variables` that are absent or empty in the environment, in the `with` block.

    For frameworks and scripts that look for torchrun's variables. Users often export MASTER_* alone.
    """
    added = {name: value for name, value in variables.items() if not os.environ.get(name)}
    add_copies(added, os.environ)
    try:
        yield
    finally:
        remove_copies(added, os.environ)
