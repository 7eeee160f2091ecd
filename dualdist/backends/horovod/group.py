"""The collectives of one of Horovod's process sets, as a Group."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...errors import HorovodInternalError
from ..base import Group, Work
from .gate import await_gate
from .installed import real_horovod
from .patience import Patience

with real_horovod():
    import horovod.torch as hvd

__all__ = ("HorovodGroup", "wrapped")

_SLEEP_SECONDS = (0.00005, 0.001)
"""The first and the longest pause between two polls of an operation. Horovod's own cycle is 1 ms."""
_BROADCAST_NAMES = 8
"""Horovod allows one operation of a name at a time. As many broadcasts can be in progress."""


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
    def __init__(self, handle: int, output: torch.Tensor | None, patience: Patience) -> None:
        self._handle = handle
        self._output = output
        self._patience = patience

    def wait(self) -> None:
        pause, longest = _SLEEP_SECONDS
        with wrapped():
            while not hvd.poll(self._handle):
                self._patience.check()
                time.sleep(pause)
                pause = min(2 * pause, longest)
            result = hvd.synchronize(self._handle)
        if self._output is not None:
            self._output.copy_(result[0] if isinstance(result, tuple) else result)

    def done(self) -> bool:
        return bool(hvd.poll(self._handle))


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
        patience = Patience(self.timeout, self.has_lost_member)
        with wrapped():
            await_gate(patience)
            return _HorovodWork(operation(*args, process_set=self._set), output, patience)

    def allreduce_(self, tensor: torch.Tensor, op: int, tag: str = "") -> Work:
        name = f"{self._prefix}.allreduce.{tag}"
        return self._start(functools.partial(hvd.allreduce_async_, op=op), tensor, None, name)

    def broadcast_(self, tensor: torch.Tensor, root: int) -> Work:
        name = f"{self._prefix}.broadcast.{next(self._broadcasts)}"
        return self._start(hvd.broadcast_async_, tensor, self.ranks[root], name)

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
