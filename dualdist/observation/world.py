"""What observes one world, and the functions with which a script asks for it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..core.agreement.guard import Observation, Observer, Pending
from ..core.backends.base import Backend
from ..core.checks import flag
from ..core.checks import path as checked_path
from ..core.collectives.objects import allgather_object
from ..core.launch import is_on
from ..core.meeting.links import own_node
from ..core.types import Settings
from ..core.world import current
from ..errors import logger
from .dump import Dump
from .report import combined, write
from .status import Contact
from .survey import StallWatch
from .timeline import Timeline


class WorldObservation(Observation):
    """The observers of one world."""

    def __init__(self, backend: Backend, settings: Settings) -> None:
        self._env = settings.env
        self.watch = StallWatch(backend.rank, backend.size, backend.address, settings)
        self.usage = self.watch.usage
        server = self.watch.server
        cpus, threads = os.sched_getaffinity(0), torch.get_num_threads()
        own: CpuThreads = own_node(), 0 if os.environ.get("OMP_NUM_THREADS") else threads, len(cpus), min(cpus)
        self.contact = None if server is None else server.contact, own
        self.timeline = self.watch.timeline = Timeline(backend)
        self._dump: Dump | None = None

    def observer(self, name: str, ranks: tuple[int, ...], pending: Pending | None) -> Observer:
        return self.watch.add_channel(name, ranks, pending)

    def start(self, contacts: Sequence[Any]) -> None:
        servers = [server and Contact(*server) for server, _ in contacts]
        self.watch.start([server for server in servers if server is not None])
        self._dump = Dump(self.watch, self._env.get("DUALDIST_DUMP_DIR"), repr(servers[0]))
        if self.watch.rank == 0:
            _warn_of_too_many_threads(tuple(threads) for _, threads in contacts)
        if is_on(self._env, "DUALDIST_SUMMARY") or (self.watch.slow_share or 1) < 1:
            self.usage.measure_loading()
        if (path := self._env.get("HOROVOD_TIMELINE", "")) not in ("", "DYNAMIC"):  # that asks for start_timeline()
            self.timeline.open(path, is_on(self._env, "HOROVOD_TIMELINE_MARK_CYCLES"))

    def leave(self) -> None:
        self.watch.close()

    def close(self) -> None:
        self.timeline.close()
        if self.usage.end_measuring is not None:
            self.usage.end_measuring()
        if self._dump is not None:
            self._dump.close()
            if is_on(self._env, "DUALDIST_SUMMARY"):
                write(self.usage.total(self.watch.rank, self.watch.size), self._env["DUALDIST_SUMMARY"])

    def abandon(self) -> None:
        self.watch.abandon()
        if self._dump is not None:
            self._dump.close(is_forked=True)


# Warns when the processes of a host start more threads than it has CPUs, which can make training several times slower.
#
# torchrun, `dualdist run` and `spawn` set OMP_NUM_THREADS. mpirun, srun and horovodrun do not, so each of their
# processes starts one thread per CPU.


CpuThreads = tuple[str, int, int, int]
"""The host of a process, as `own_node` names it, its threads, the CPUs that it may use, and the first of these.

The threads are 0 if the user has set OMP_NUM_THREADS. Processes that are bound to other CPUs differ in the first one.
"""


def _warn_of_too_many_threads(processes: Iterable[CpuThreads]) -> None:
    """Log one warning if, on a host, processes that share CPUs have more threads than CPUs. Local."""
    for (host, threads, cpus, _), count in Counter(processes).items():
        if count > 1 and threads * count > cpus:
            best = max(1, cpus // count)
            logger.warning(
                "On %s, %d processes with %d threads each share %d CPUs. This can make training several times slower. "
                "Set OMP_NUM_THREADS=%d for all processes (with Open MPI: mpirun -x OMP_NUM_THREADS=%d).",
                *(host.rpartition("-")[0], count, threads, cpus, best, best),
            )
            return


def _observation() -> WorldObservation:
    observation = current().observation
    assert isinstance(observation, WorldObservation)
    return observation


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Start writing a Chrome trace of all collectives, as HOROVOD_TIMELINE does from `init()` on. Local.

    Only rank 0 writes; the call does nothing on other ranks. Unlike in Horovod, HOROVOD_TIMELINE need not be set.
    chrome://tracing and ui.perfetto.dev can read the file at any time, also after a crash.

    Args:
        file_path: overwritten, unless it is the open timeline. A timeline that is open under another path is closed.
        mark_cycles: write an event CYCLE_START whenever ranks begin to agree on a collective.

    Raises:
        ConfigurationError: the file cannot be written.
        NotInitializedError: before `init()`.
    """
    _observation().timeline.open(str(checked_path("file_path", file_path)), flag("mark_cycles", mark_cycles))


def stop_timeline() -> None:
    """Close the file that `start_timeline` or HOROVOD_TIMELINE opened, if any. Local.

    Raises NotInitializedError before `init()`.
    """
    _observation().timeline.close()


def report() -> dict[str, Any]:
    """Return how the ranks have spent their time since the last call, and for which rank the others wait.

    Collective over the world, for example once an epoch.

    Returns:
        A dictionary, equal on all ranks, that JSON can hold:

        - "ranks": for each rank a dictionary with "rank", "size" (of the world), "start" (the time of the last call, in
          seconds since the epoch), "seconds" (since then), "calls" (collectives for which it has waited),
          "bytes_reduced" (that it has given to reductions; gradients before compression) and shares of the time that
          add up to 1: "data_loading" (until a DataLoader gives the next batch), "waiting" (for other ranks),
          "communication" (the wait for data that all ranks have in common) and "computing" (the rest). Waits of other
          threads than the main one do not count.
        - "slowest": the rank for which the others wait; None if the shares of waiting differ by less than 0.05, or not
          by more than chance: parts of the time differ as much.
        - "reason": what takes longer on that rank, "computing" or "data_loading"; None without such a rank.
        - "share": how much more of the time the others wait than that rank.
        - "since": the "start" of the first of the successive reports, until this one, that name the same rank.
        - "scalars": the shares of all ranks in one dictionary, for SummaryWriter.add_scalars of TensorBoard.

    How long data loading takes is measured from the first call on, or from `init` on with DUALDIST_SUMMARY or
    DUALDIST_SLOW_WARN_SHARE. Time that a GPU waits is seen only where the host waits for the GPU, as in `item()`.

    Raises HorovodInternalError as `allgather_object`, and NotInitializedError before `init()`.
    """
    watch, usage = _observation().watch, _observation().usage
    mine = usage.take(watch.rank, watch.size)
    usage.measure_loading()
    reports = allgather_object(mine, name="dualdist.report")
    usage.last_report = combined(reports, usage.last_report)
    return usage.last_report
