"""The collectives of one of Horovod's process sets, as a Group."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch

from ..core.backends.base import CombinedWork, Group, Work
from ..core.process import Patience, in_time, skip_destructors_at_exit
from ..errors import BackendUnavailableError, HorovodInternalError, StallError
from ..mpi import meeting as mpi
from . import horovods_version, real_horovod

with real_horovod():
    import horovod.torch as hvd

# Steps in which Horovod waits for other ranks, for which it has no timeout: those of the start, and the shutdown.

T = TypeVar("T")

_SHUTDOWN_SECONDS = 5.0


def limited(step: Callable[[], T], rank: int, seconds: float) -> T:
    """Return `step()`. Raises StallError, which names missing ranks of this host, after `seconds`."""
    try:
        return in_time(step, seconds)
    except (TimeoutError, StallError) as error:  # ours, or the step's own
        never_shut_down()
        raise StallError(mpi.waited(rank, "Horovod", seconds)) from error


stuck = threading.Event()
"""Set when Horovod's shutdown did not end, or when this process will abort soon (`report_before_abort`)."""


def never_shut_down() -> None:
    """Let this process end without Horovod's shutdown, which waits for ranks that have ended."""
    forget_shutdown()
    skip_destructors_at_exit()


def forget_shutdown() -> None:
    """Take back what calls Horovod's shutdown when this process ends. Local."""
    for function in (hvd.mpi_ops._basics.shutdown, shut_down_in_time):
        atexit.unregister(function)


def shut_down_in_time() -> None:
    """Shut Horovod down, in 5 s at most. It waits for all ranks: with Gloo, until its timeout."""
    try:
        in_time(hvd.shutdown, _SHUTDOWN_SECONDS)
    except TimeoutError:
        stuck.set()
        mpi.never_finalize("Horovod's shutdown")
        never_shut_down()


_CRASH_SECONDS = 10.0
_find_cause: Callable[[], str] | None = None
"""What to print before this process aborts; None while no world is joined."""
_former_report: Callable[[], None] | None = None
"""The standard library's: prints the exception, and aborts."""


def report_before_abort(find_cause: Callable[[], str] | None) -> None:
    """When a thread of C++ is about to abort this process, print `find_cause()`, wait for 10 s, print the exception.

    Where a rank dies, the thread of Horovod's Gloo that reads from it often throws an exception that nobody catches
    (gloo/transport/tcp/pair.cc, `Pair::read`). Meanwhile the script may raise its own error, or may wait for a lock
    that the thread holds.
    """
    global _find_cause, _former_report
    _find_cause = find_cause
    # Otherwise this thread might wait for Python's lock without an end.
    if _former_report is None and _number_of_repairs() >= _RELEASES_PYTHONS_LOCK:
        with contextlib.suppress(OSError, AttributeError):  # another standard library
            set_terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
            set_terminate.restype = type(_report_crash)
            _former_report = set_terminate(_report_crash)
            # From then on, no thread of C++ may call Python: it would end in the middle, and crash again.
            atexit.register(set_terminate, _former_report)


@ctypes.CFUNCTYPE(None)  # type: ignore[untyped-decorator]
def _report_crash() -> None:
    if _find_cause is not None:
        stuck.set()
        never_shut_down()
        cause = "the cause is not known"
        with contextlib.suppress(Exception):
            cause = _find_cause()
        os.write(2, f"dualdist: a crash of Horovod ends this process in 10 s; {cause}\n".encode())
        time.sleep(_CRASH_SECONDS)
    if _former_report is not None:
        _former_report()


_SLEEP_SECONDS = (0.00005, 0.001)
"""The shortest and the longest pause between two polls of an operation."""
_SLEEP_SHARE = 1 / 8
"""The pause as a share of the time waited. Who notices the end late misses Horovod's next cycle (1 ms)."""
_BROADCAST_NAMES = 8
"""Horovod allows one operation of a name at a time. As many calls of `broadcast_` can be in progress."""


@contextlib.contextmanager
def wrapped() -> Iterator[None]:
    """Convert Horovod's exceptions into those of this package."""
    try:
        yield
    except (hvd.HorovodInternalError, RuntimeError, ValueError) as error:
        # ValueError: Horovod's background thread has ended (horovod/common/process_sets.py, _create_process_set).
        if isinstance(error, HorovodInternalError):
            raise
        raise HorovodInternalError(str(error)) from error


class _HorovodWork(Work):
    """An operation of Horovod in progress."""

    def __init__(self, handle: int, output: torch.Tensor | None, patience: Patience) -> None:
        """handle: Horovod's. output: where to copy the result; None: it is in the tensor that was passed."""
        self._handle, self._output, self._patience = handle, output, patience

    def wait(self) -> None:
        shortest, longest = _SLEEP_SECONDS
        start = time.monotonic()
        with wrapped():
            while not hvd.poll(self._handle):
                self._patience.check()
                time.sleep(min(max(shortest, (time.monotonic() - start) * _SLEEP_SHARE), longest))
            result = hvd.synchronize(self._handle)
        if self._output is not None:
            self._output.copy_(result[0] if isinstance(result, tuple) else result)

    def done(self) -> bool:
        return bool(hvd.poll(self._handle))


class HorovodGroup(Group):
    reduce_dtypes = frozenset({torch.float16, torch.float32, torch.float64, torch.int32, torch.int64})

    def __init__(self, ranks: Sequence[int], rank: int, process_set: Any, prefix: str, timeout: float) -> None:
        super().__init__(ranks, rank)
        self._set = process_set
        self._prefix = prefix
        self._broadcasts = itertools.cycle(range(_BROADCAST_NAMES))
        self._timeout = timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()

    def wire_device(self, device: torch.device) -> torch.device:
        return device if device.type == "cuda" and hvd.nccl_built() else torch.device("cpu")

    def _start(self, operation: Callable[..., int], *args: Any, output: torch.Tensor | None = None) -> Work:
        """Start one of Horovod's operations. args: all arguments but the process set."""
        # Horovod makes a tensor for the result here, and its thread, which is never in inference mode, resizes it.
        with torch.inference_mode(False), wrapped():
            handle = operation(*args, process_set=self._set)
        return _HorovodWork(handle, output, Patience(self.has_lost_member, self._timeout))

    def abort(self) -> None:
        skip_destructors_at_exit()  # seldom, one has waited for ever in a process whose host was cut off
        if hvd.mpi_enabled():  # its thread may wait in MPI for a rank that has stopped
            forget_shutdown()
            atexit.register(shut_down_in_time)

    def allreduce_(self, tensor: torch.Tensor, op: int, tag: str = "") -> Work:
        name = f"{self._prefix}.allreduce.{tag}"
        return self._start(functools.partial(hvd.allreduce_async_, op=op), tensor, None, name)

    def broadcast_(self, tensor: torch.Tensor, root: int) -> Work:
        return self._broadcast(tensor, root, f"broadcast.{next(self._broadcasts)}")

    def broadcast_all_(self, tensors: Iterable[torch.Tensor], root: int) -> Work:
        works = [self._broadcast(tensor, root, f"broadcast_all.{number}") for number, tensor in enumerate(tensors)]
        return CombinedWork(works)

    def _broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Work:
        return self._start(hvd.broadcast_async_, tensor, self.ranks[root], f"{self._prefix}.{name}")

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        return self._start(hvd.allgather_async, tensor, f"{self._prefix}.allgather", output=output)

    def allgatherv(self, tensor: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        output = torch.empty(sum(counts), dtype=torch.uint8, device=tensor.device)
        self.allgather(output, tensor).wait()
        return output

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work:
        splits, name = torch.tensor(sent, dtype=torch.int32, device="cpu"), f"{self._prefix}.alltoall"
        return self._start(hvd.alltoall_async, tensor, splits, name, output=output)


# Horovod's process sets: those that it has, and those that it cannot make.

_CONNECTS_ALL_PROCESS_SETS = _RELEASES_PYTHONS_LOCK = 2
"""From this repair on, Gloo connects process sets over several hosts, and a waiting call lets other threads run."""


def _number_of_repairs() -> int:
    """Return the number of the last repair of dualdist install-horovod that the installed Horovod has, else 0."""
    repair = re.search(r"\.patch(\d+)", horovods_version())
    return 0 if repair is None else int(repair[1])


def known_process_sets() -> dict[tuple[int, ...], Any]:
    """Return Horovod's process sets: the global one, and those that the script made before dualdist adopted Horovod."""
    known = {}
    for number, ranks in hvd.mpi_ops._basics._get_process_set_ids_and_ranks().items():
        known[tuple(ranks)] = hvd.ProcessSet(ranks)
        known[tuple(ranks)].process_set_id = number
    return known


def make_process_set(ranks: Sequence[int]) -> Any:
    """Have Horovod make a process set. Collective over the world. Waits without an end for a rank that is lost."""
    made = hvd.add_process_set(list(ranks))
    hvd.barrier()  # otherwise the call fails on a slow rank when another rank leaves right after it
    return made


def check_process_set(ranks: Sequence[int], nodes: Sequence[str]) -> None:
    """Raise BackendUnavailableError if Horovod might wait without an end for a process set of `ranks`. Local.

    nodes: the host of each rank of the world. Every rank raises the same error.

    A rank connects to those of the set that have its local rank in the world, and gives the connection the name of its
    local rank in the set, which may be another one (horovod/common/gloo/gloo_context.cc, InitializeForProcessSet).
    dualdist install-horovod repairs that; its version has the number of the last repair.
    """
    version, is_repaired = horovods_version(), _number_of_repairs() >= _CONNECTS_ALL_PROCESS_SETS
    if is_repaired or hvd.mpi_enabled() or len({nodes[rank] for rank in ranks}) == 1:
        return
    raise BackendUnavailableError(
        f"Horovod {version} cannot connect a process set of ranks {list(ranks)}: with its Gloo controller on several "
        "hosts, it confuses the ranks of such a set. Use a Horovod that dualdist install-horovod has built, which "
        "repairs that, its MPI controller, or the torch backend."
    )
