"""The collectives of one of Horovod's process sets, as a Group."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ...errors import HorovodInternalError
from ...process_exit import skip_destructors_at_exit
from ..base import CombinedWork, Group, Work
from ..patience import Patience
from . import gate
from .installed import real_horovod
from .limited import limit_shutdown_at_exit

with real_horovod():
    import horovod.torch as hvd

__all__ = ("HorovodGroup", "wrapped")

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
        self._question = gate.ask()
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
