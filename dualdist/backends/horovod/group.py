"""The collectives of one of Horovod's process sets, as a Group."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from ...errors import BackendUnavailableError, HorovodInternalError, StallError
from ...meeting import mpi
from ...meeting.mpi import missing_on_host, waited
from ...process_exit import skip_destructors_at_exit
from ..base import CombinedWork, Group, Work
from ..patience import Patience, in_time
from .installed import (
    CONNECTS_ALL_PROCESS_SETS,
    STARTS_WHILE_WAITING,
    has_repair,
    horovods_version,
    real_horovod,
)

# Finds out when Horovod accepts an operation, in a way that does not block the process.
#
# Horovod starts an operation under the mutex of its table of process sets, and keeps Python's global lock meanwhile.
# With HOROVOD_DYNAMIC_PROCESS_SETS its background thread holds the same mutex while it waits for the other ranks
# (horovod/common/process_set.cc:183-192). When one of these is stopped, the process would stop, too, until Gloo's
# timeout: no thread could answer questions about this rank. Therefore another thread locks the mutex first, without
# Python's global lock. Between two cycles of Horovod, that takes less than a millisecond.
#
# The thread that starts the operation can still stop if another rank is lost between the answer and the start.
#
# A Horovod that was built by ci/install-horovod keeps neither of the two while it waits for other ranks, so that nobody
# needs to ask. Only while it connects a new process set does the mutex stay locked: then the gate is closed.

with real_horovod():
    import horovod.torch as hvd


class Question:
    """A question whether Horovod accepts an operation.

    A signal handler may ask another one inside of each call here. After a handler that takes longer than `seconds`,
    SimpleQueue.get(timeout=seconds) would wait for ever; inside of Event.wait, the handler would stop the answers.
    """

    def __init__(self) -> None:
        self._answer = threading.Lock()
        """Locked until there is an answer."""
        self._answer.acquire()
        self._is_known = False

    def answer(self) -> None:
        """Let `has_answered` return True."""
        self._answer.release()

    def has_answered(self, seconds: float) -> bool:
        """Wait at most `seconds`, and return whether there is an answer."""
        if not self._is_known and self._answer.acquire(timeout=seconds):
            self._is_known = True
        return self._is_known


class _Gate:
    """Locks and unlocks the mutex in a thread of its own, once for each question."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Question] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name="dualdist-horovod", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            question = self._asked.get()
            hvd.mpi_ops._basics.MPI_LIB_CTYPES.horovod_number_of_process_sets()  # locks the mutex
            question.answer()

    def ask(self) -> Question:
        question = Question()
        self._asked.put(question)
        return question


_gate: _Gate | None = None
_one_at_a_time = threading.RLock()
"""Reentrant: a signal handler may make a collective while this thread starts one."""
_is_repaired = has_repair(STARTS_WHILE_WAITING, horovods_version())
_closed: set[object] = set()
"""An item for each `closed` block."""
_OPEN = Question()
_OPEN.answer()


def ask() -> Question:
    """Ask when Horovod accepts an operation. Does not wait."""
    global _gate
    if _is_repaired and not _closed:
        return _OPEN
    with _one_at_a_time:
        if _gate is None or not _gate.thread.is_alive():  # a forked process has no threads
            _gate = _Gate()
        return _gate.ask()


@contextlib.contextmanager
def closed() -> Iterator[None]:
    """Ask Horovod before every operation in the block, in which it connects a new process set."""
    key = object()
    _closed.add(key)
    try:
        yield
    finally:
        _closed.discard(key)


# Steps in which Horovod waits for other ranks, for which it has no timeout: those of the start, and the shutdown.

with real_horovod():
    import horovod.torch as hvd


T = TypeVar("T")

_SHUTDOWN_SECONDS = 5.0


def limited(step: Callable[[], T], rank: int, seconds: float) -> T:
    """Return `step()`. Raises StallError, which names missing ranks of this host, after `seconds`."""
    try:
        return in_time(step, seconds)
    except (TimeoutError, StallError) as error:  # ours, or the step's own
        never_shut_down()
        raise StallError(waited(rank, missing_on_host(), "Horovod", seconds)) from error


def never_shut_down() -> None:
    """Let this process end without Horovod's shutdown, which waits for ranks that have ended."""
    forget_shutdown()
    skip_destructors_at_exit()


def forget_shutdown() -> None:
    """Take back what calls Horovod's shutdown when this process ends. Local."""
    for function in (hvd.mpi_ops._basics.shutdown, _shut_down):
        atexit.unregister(function)


def limit_shutdown_at_exit() -> None:
    """After a failure, let Horovod's shutdown take at most 5 s when this process ends. Local.

    Its background thread may wait in MPI for a rank that has stopped.
    """
    forget_shutdown()
    atexit.register(_shut_down)


def _shut_down() -> None:
    try:
        in_time(hvd.shutdown, _SHUTDOWN_SECONDS)
    except TimeoutError:
        mpi.record_failure("Horovod's shutdown")
        skip_destructors_at_exit()


with real_horovod():
    import horovod.torch as hvd


_SLEEP_SECONDS = (0.00005, 0.001)
"""The shortest and the longest pause between two polls of an operation."""
_SLEEP_SHARE = 1 / 8
"""The pause as a share of the time waited. Who notices the end late misses Horovod's next cycle (1 ms)."""
_START_SECONDS = 0.1
"""How long to wait at a time until Horovod accepts an operation. It usually takes less than a millisecond."""
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
    """An operation of Horovod, which starts when Horovod accepts it; `wait` starts it at the latest.

    So a caller that starts several operations does not wait for a rank that is lost, once for each of them.
    """

    def __init__(self, start: Callable[[], int], output: torch.Tensor | None, patience: Patience) -> None:
        """start: starts the operation and returns Horovod's handle."""
        self._start = start
        self._question = ask()
        self._handle: int | None = None
        self._output = output
        self._patience = patience
        self._has_started(_START_SECONDS)

    def _has_started(self, seconds: float) -> bool:
        """Wait at most `seconds` until Horovod accepts the operation, and return whether it has started."""
        if self._handle is None and self._question.has_answered(seconds):
            with wrapped():
                self._handle = self._start()
        return self._handle is not None

    def wait(self) -> None:
        while not self._has_started(_START_SECONDS):
            self._patience.check()
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
        return self._has_started(0.0) and bool(hvd.poll(self._handle))


class HorovodGroup(Group):
    reduce_dtypes = frozenset({torch.float16, torch.float32, torch.float64, torch.int32, torch.int64})

    def __init__(
        self, ranks: Sequence[int], rank: int, process_set: Any, prefix: str, timeout: float
    ) -> None:
        super().__init__(ranks, rank)
        self._set = process_set
        self._prefix = prefix
        self._broadcasts = itertools.cycle(range(_BROADCAST_NAMES))
        self.timeout = timeout

    def wire_device(self, device: torch.device) -> torch.device:
        return device if device.type == "cuda" and hvd.nccl_built() else torch.device("cpu")

    def _start(self, operation: Callable[..., int], *args: Any, output: torch.Tensor | None = None) -> Work:
        """Start one of Horovod's operations. args: all arguments but the process set."""
        start = functools.partial(operation, *args, process_set=self._set)
        return _HorovodWork(start, output, Patience(self.has_lost_member, self.timeout))

    def abort(self) -> None:
        skip_destructors_at_exit()  # seldom, one has waited for ever in a process whose host was cut off
        if hvd.mpi_enabled():
            limit_shutdown_at_exit()

    def allreduce_(self, tensor: torch.Tensor, op: int, tag: str = "") -> Work:
        name = f"{self._prefix}.allreduce.{tag}"
        return self._start(functools.partial(hvd.allreduce_async_, op=op), tensor, None, name)

    def broadcast_(self, tensor: torch.Tensor, root: int) -> Work:
        return self._broadcast(tensor, root, f"broadcast.{next(self._broadcasts)}")

    def broadcast_all_(self, tensors: Iterable[torch.Tensor], root: int) -> Work:
        works = [
            self._broadcast(tensor, root, f"broadcast_all.{number}") for number, tensor in enumerate(tensors)
        ]
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
        splits, name = torch.tensor(sent, dtype=torch.int32), f"{self._prefix}.alltoall"
        return self._start(hvd.alltoall_async, tensor, splits, name, output=output)


# Horovod's process sets: those that it has, and those that it cannot make.

with real_horovod():
    import horovod.torch as hvd


def known_process_sets() -> dict[tuple[int, ...], Any]:
    """Return Horovod's process sets: the global one, and those that the script made before dualdist adopted Horovod."""
    known = {}
    for number, ranks in hvd.mpi_ops._basics._get_process_set_ids_and_ranks().items():
        known[tuple(ranks)] = hvd.ProcessSet(ranks)
        known[tuple(ranks)].process_set_id = number
    return known


def make_process_set(ranks: Sequence[int]) -> Any:
    """Have Horovod make a process set. Collective over the world. Waits without an end for a rank that is lost."""
    with closed():
        made = hvd.add_process_set(list(ranks))
        hvd.barrier()  # otherwise the call fails on a slow rank when another rank leaves right after it
    return made


def check_process_set(ranks: Sequence[int], nodes: Sequence[str]) -> None:
    """Raise BackendUnavailableError if Horovod would wait without an end for a process set of `ranks`. Local.

    nodes: the host of each rank of the world. Every rank raises the same error.
    """
    version = horovods_version()
    if has_repair(CONNECTS_ALL_PROCESS_SETS, version) or hvd.mpi_enabled() or can_connect(ranks, nodes):
        return
    raise BackendUnavailableError(
        f"Horovod {version} cannot connect a process set of ranks {list(ranks)}: with its Gloo controller on several "
        "hosts, it confuses the ranks of such a set. Use a Horovod that ci/install-horovod has built, which repairs "
        "that, its MPI controller, or the torch backend."
    )


def can_connect(ranks: Sequence[int], nodes: Sequence[str]) -> bool:
    """Return whether Horovod's own Gloo controller connects a process set of `ranks`.

    A rank connects to those of the set that have its local rank in the world, and gives the connection the name of its
    local rank in the set (horovod/common/gloo/gloo_context.cc, InitializeForProcessSet). So ranks that connect to each
    other must have one name that no others have.
    """
    in_world, in_set = _local_ranks(range(len(nodes)), nodes), _local_ranks(ranks, nodes)
    names: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        names[in_world[rank]].append(in_set[rank])
    uses = Counter(name for own in names.values() for name in own)
    return all(len(own) == 1 or own.count(own[0]) == len(own) == uses[own[0]] for own in names.values())


def _local_ranks(ranks: Sequence[int], nodes: Sequence[str]) -> dict[int, int]:
    """Return rank -> its place among those of `ranks` that are on its host."""
    counts: dict[str, int] = defaultdict(int)
    local_ranks = {}
    for rank in ranks:
        local_ranks[rank] = counts[nodes[rank]]
        counts[nodes[rank]] += 1
    return local_ranks
