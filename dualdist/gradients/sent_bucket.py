"""One bucket that was sent: an allreduce sums it, or a communication hook of the user combines it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from ..backends.base import FailedWork, Group, Work
from ..collectives.reduction import scale_
from ..collectives.wire import reduction_dtype
from ..errors import HorovodInternalError
from ..types import Sum
from .bucket_memory import BucketMemory
from .comm_hook import HookWork
from .options import SyncOptions

__all__ = ("HookedBucket", "SentBucket", "SummedBucket")

Record = Callable[[Work], Work]
"""Returns a work that also records the time of the given one."""


class SentBucket(ABC):
    """A bucket that was sent."""

    work: Work
    """Ends when its data has been combined."""
    has_started = True
    """False if the backend could not start `work`, which then raises."""
    error: Exception | None = None
    """What a communication hook has raised on this rank, after `finish`."""

    @abstractmethod
    def finish(self, memory: BucketMemory, factor: float) -> None:
        """Write what was combined to `memory`, after `work`. factor: what a sum is multiplied by."""


class SummedBucket(SentBucket):
    """A bucket that an allreduce sums."""

    def __init__(
        self, options: SyncOptions, group: Group, memory: BucketMemory, tag: str, record: Record
    ) -> None:
        """Start the allreduce."""
        self._options = options
        compressed, self._context = options.compression.compress(memory.flat)
        self._dtype = compressed.dtype
        dtype = reduction_dtype(compressed.dtype, group)
        self._wire = compressed.to(group.wire_device(memory.flat.device), dtype)
        scale_(self._wire, options.reduction.prescale_factor)
        work: Work
        try:
            work = group.allreduce_(self._wire, Sum, tag=tag)
        except HorovodInternalError as error:
            work = FailedWork(error)
            self.has_started = False
        self.work = record(work)

    def finish(self, memory: BucketMemory, factor: float) -> None:
        scale_(self._wire, factor)
        combined: Any = self._wire
        if not self._options.only_casts:
            compressed = combined.to(memory.flat.device, self._dtype)
            combined = self._options.compression.decompress(compressed, self._context)
        memory.fill(combined)


class HookedBucket(SentBucket):
    """A bucket that a communication hook combines."""

    def __init__(self, hook_work: HookWork, record: Record) -> None:
        """hook_work: a call of the hook that is queued."""
        self._hook_work = hook_work
        self.work = record(hook_work)

    def finish(self, memory: BucketMemory, factor: float) -> None:
        self.error = self._hook_work.error
        result: torch.Tensor | None = self._hook_work.result
        if result is not None:
            memory.fill(result)
