"""Process groups of torch.distributed, and what each does when the other ranks fail."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import accelerator
from ..errors import HorovodInternalError, StallError
from ..executor import CHECK_SECONDS, Patience, in_thread
from ..process_exit import never_delete, skip_destructors_at_exit
from .base import REDUCE_OPERATIONS, Group, Work

_CHECK_INTERVAL = timedelta(seconds=CHECK_SECONDS)
_RING_SIZE = 8
"""Up to this size, Gloo's allgather takes fewer steps (size - 1) than a gather and a broadcast (1 + log2(size))."""
_ABORT_SECONDS = 30.0
"""How long to wait for the end of NCCL's kernels after a failure."""
# Before torch 2.6, destroying a group ended its kernels too.
abort_process_group = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)


@contextlib.contextmanager
def wrapped() -> Iterator[None]:
    """Convert c10d's exceptions into those of this package."""
    try:
        yield
    except HorovodInternalError:
        raise
    except RuntimeError as error:
        text = str(error)
        if "aborted" in text and not dist.is_initialized():
            raise HorovodInternalError(
                "torch.distributed.destroy_process_group() has destroyed the groups of dualdist, too. Call "
                "hvd.shutdown() in its place."
            ) from error
        if "timed out" in text.lower() or "timeout" in text.lower():
            raise StallError(f"A collective did not finish in time: {text}") from error
        raise HorovodInternalError(text) from error


class _TorchWork(Work):
    def __init__(self, work: dist.Work, device: torch.device, patience: Patience) -> None:
        self._work = work
        self._device = device
        self._patience = patience

    def wait(self) -> None:
        with wrapped():
            if self._device.type != "cpu":
                self._work.wait()
                return
            while not self._ends_within(_CHECK_INTERVAL):
                self._patience.check()

    def _ends_within(self, limit: timedelta) -> bool:
        """Wait at most `limit`, and return whether the collective has succeeded. Raises its error."""
        try:
            self._work.wait(limit)
        except RuntimeError:
            if not self._work.is_completed():
                return False
            self._work.wait()  # its result, or its error
        return True

    def done(self) -> bool:
        return bool(self._work.is_completed()) or self._patience.has_lost_member()

    def wait_for(self, seconds: float) -> None:
        if self._device.type == "cpu":  # NCCL would abort the collective
            limit = timedelta(seconds=max(seconds, 0.001))  # for gloo, 0 means no limit
            with contextlib.suppress(RuntimeError):  # late or failed: `wait` raises it
                self._work.wait(limit)


class TorchGroup(Group):
    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        process_group: Any,
        carried: frozenset[str],
        device: torch.device | None,
    ) -> None:
        super().__init__(ranks, rank)
        self._pg = process_group
        self._carried = carried
        self._device = device
        """The device to which the transport is bound."""
        self._abort: Future[None] | None = None
        self._abort_end = math.inf
        """When to stop waiting for `_abort`."""
        self.is_stuck = False
        """Whether `_abort` did not end in time."""

    @property
    def is_aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._abort is not None

    def wire_device(self, device: torch.device) -> torch.device:
        if device.type not in self._carried:
            return torch.device("cpu")
        # NCCL refuses tensors on another GPU than its own, as of a model on two of them.
        return self._device if self._device is not None and device.type == self._device.type else device

    def _started(self, work: dist.Work, tensor: torch.Tensor) -> Work:
        return _TorchWork(work, tensor.device, Patience(self.has_lost_member))

    def allreduce_(self, tensor: torch.Tensor, op: int, tag: str = "") -> Work:
        options = dist.AllreduceOptions()
        options.reduceOp = REDUCE_OPERATIONS[op].c10d
        with wrapped():
            return self._started(self._pg.allreduce([tensor], options), tensor)

    def broadcast_(self, tensor: torch.Tensor, root: int) -> Work:
        return self._broadcast([tensor], root)

    def broadcast_all_(self, tensors: Iterable[torch.Tensor], root: int) -> Work:
        if getattr(self._pg, "broadcasts_lists", False):
            return self._broadcast(list(tensors), root)
        return super().broadcast_all_(tensors, root)

    def _broadcast(self, tensors: list[torch.Tensor], root: int) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank = root
        with wrapped():
            return self._started(self._pg.broadcast(tensors, options), tensors[0])

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        with wrapped():
            return self._started(self._pg._allgather_base(output, tensor), tensor)

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work:
        with wrapped():
            work = self._pg.alltoall_base(output, tensor, list(received), list(sent))
        return self._started(work, tensor)

    def allgather_bytes(self, message: bytes) -> list[bytes]:
        if self.size <= _RING_SIZE:
            return super().allgather_bytes(message)
        sent = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        received = torch.empty(self.size, len(message), dtype=torch.uint8, device="cpu")
        options = dist.GatherOptions()
        options.rootRank = 0
        outputs = [list(received.unbind())] if self.rank == 0 else []
        with wrapped():
            gathered = self._started(self._pg.gather(outputs, [sent], options), sent)
        gathered.wait()
        self.broadcast_(received, 0).wait()
        return [row.numpy().tobytes() for row in received]

    def set_timeout(self, timeout: timedelta) -> None:
        if self._pg is not None:
            set_timeout(timeout, self._pg)

    def abort(self) -> None:
        """Begin to end the kernels of NCCL, which otherwise wait for a dead peer until the timeout.

        In a thread: NCCL may wait until the kernel of another communicator ends, which is aborted next
        (https://github.com/pytorch/pytorch/issues/119797).
        """
        if self._pg is None or self._device is None or self.is_aborted:
            return
        step = functools.partial(_abort_device_part, self._pg, self._device)
        self._abort_end = time.monotonic() + _ABORT_SECONDS
        try:
            self._abort = in_thread(step)
        except RuntimeError:  # the interpreter ends
            self._abort = Future()
            step()
            self._abort.set_result(None)

    def close(self) -> None:
        process_group, self._pg = self._pg, None
        if process_group is None or not dist.is_initialized():
            return
        if self._abort is None:
            dist.destroy_process_group(process_group)  # it waits for the collectives of the group
        elif concurrent.futures.wait([self._abort], max(0.0, self._abort_end - time.monotonic())).done:
            abort_process_group(process_group)
        else:
            self.is_stuck = True
            never_delete(process_group)
            skip_destructors_at_exit()


def _abort_device_part(process_group: Any, device: torch.device) -> None:
    accelerator.bind(device)  # each thread has a current device of its own
    with contextlib.suppress(RuntimeError):  # its watchdog may have aborted it
        backend = process_group._get_backend(device)
        (backend.abort if hasattr(backend, "abort") else backend._shutdown)()  # before torch 2.6


def set_timeout(timeout: timedelta, process_group: Any) -> None:
    """Set the timeout of later collectives."""
    # Older releases of torch have only the private function, newer ones warn of it.
    setter = getattr(process_group, "set_timeout", None)
    if setter is not None:
        setter(timeout)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, process_group)
