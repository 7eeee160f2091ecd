"""Allreduces of tensors on a device over a transport that sends memory of the host, as Gloo and MPI do.

The thread that starts one waits for nothing. A stream of its own copies the tensor to pinned memory. A worker thread
waits for that copy, and starts the allreduce. `wait` copies the result back, on the stream of the thread that calls it.
"""

from __future__ import annotations

import functools
from collections import deque
from concurrent.futures import Future

import torch

from ..core import accelerator
from ..core.backends.base import Group, Work
from ..core.gradients.buckets import BucketMemory
from ..core.process import Patience, Worker, wait_for
from . import streams


class _QueuedWork(Work):
    """An allreduce that the worker thread starts."""

    def __init__(self, group: Group, tensor: torch.Tensor, host: torch.Tensor, op: int, tag: str) -> None:
        """host: what the group reduces: `tensor` itself, or memory for its copy."""
        self._group, self._tensor, self._host, self._op, self._tag = group, tensor, host, op, tag
        self._copied: torch.Event | None = None
        """An event after the copy; None if there is no copy."""
        self._started: Future[Work] = Future()

    def copy_on(self, stream: torch.Stream) -> None:
        """Copy the tensor on `stream`, after the work that this thread's stream has now. `start` waits for the copy."""
        device = self._tensor.device
        packed = streams.record_event(device)
        with streams.use_stream(stream):
            streams.wait_event(device, packed)
            self._host.copy_(self._tensor, non_blocking=True)
            self._copied = streams.record_event(device)

    def start(self) -> None:
        """Start the allreduce after the copy. `wait` raises what this raises."""
        try:
            if self._copied is not None:
                accelerator.bind(self._tensor.device)  # each thread has a current device of its own
                self._copied.synchronize()
            self._started.set_result(self._group.allreduce_(self._host, self._op, self._tag))
        except BaseException as error:
            self._started.set_exception(error)

    def wait(self) -> None:
        wait_for(self._started, Patience(self._group.has_lost_member)).wait()
        if self._copied is not None:
            self._tensor.copy_(self._host, non_blocking=True)

    def done(self) -> bool:
        started = self._started
        return started.done() and (started.exception() is not None or started.result().done())


class ThroughHost:
    """Starts the allreduces of one group, in the order of the calls."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.waiting: deque[_QueuedWork] = deque()
        """Those that the worker thread has not started yet. If there are any, `allreduce_` must start the next one."""
        self._worker = Worker(self._start_waiting, "dualdist-buckets")
        self._stream_on = functools.cache(torch.Stream)
        """The stream of the copies from a device."""

    def allreduce_(self, tensor: torch.Tensor, op: int, tag: str, held: BucketMemory | None) -> Work:
        """Start what `Group.allreduce_` does. held: keeps memory for a copy of `tensor`; None: the group sends it."""
        host = None if held is None else held.host
        if held is not None and (host is None or (host.shape, host.dtype) != (tensor.shape, tensor.dtype)):
            held.host = host = streams.host_memory(len(tensor), tensor.dtype, tensor.device)
        work = _QueuedWork(self._group, tensor, tensor if host is None else host, op, tag)
        if host is not None:
            work.copy_on(self._stream_on(tensor.device))
        self.waiting.append(work)
        self._worker.wake()
        return work

    def _start_waiting(self) -> None:
        while self.waiting:
            self.waiting[0].start()
            self.waiting.popleft()  # only now: later ones must not overtake it

    def close(self, seconds: float) -> None:
        """End the worker thread, for which to wait at most `seconds`. Local."""
        self._worker.stop(seconds)
