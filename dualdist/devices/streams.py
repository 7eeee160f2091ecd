"""Orders collectives on a device with the work of the thread that calls them.

Streams are a property of a thread. The worker thread of a channel has other streams than the caller, so that without
this a collective could read its input before the caller's kernels have written it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from ..core import accelerator
from ..core.agreement.call import Call
from ..core.agreement.channel import Channel
from ..core.agreement.matching import Execute, Verdict
from ..core.backends.base import Group

T = TypeVar("T")


class _OwnStreams(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[torch.device, torch.Stream] = {}


_own = _OwnStreams()
"""The streams of this thread for asynchronous calls."""


def _own_stream(device: torch.device) -> torch.Stream:
    if device not in _own.by_device:
        _own.by_device[device] = accelerator.new_stream(device)
    return _own.by_device[device]


def _devices_of(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    return sorted({tensor.device for tensor in tensors if accelerator.has_streams(tensor)}, key=str)


def on_streams_of_caller(execute: Execute[T], tensors: Sequence[torch.Tensor]) -> Execute[T]:
    """Return `execute` for a synchronous call: on the caller's streams, also in another thread.

    The caller waits, so that its streams get no other work meanwhile. tensors: what `execute` reads and writes.
    """
    streams = [accelerator.current_stream(device) for device in _devices_of(tensors)]
    caller = threading.get_ident()

    def execute_there(group: Group, verdict: Verdict) -> T:
        with contextlib.ExitStack() as stack:
            for stream in streams if threading.get_ident() != caller else ():
                if stream is not None:
                    stack.enter_context(accelerator.use_stream(stream))
            return execute(group, verdict)

    return execute_there


class Started(Generic[T]):
    """An asynchronous call on streams of its own: after what the caller's streams had to do when it was submitted."""

    def __init__(
        self, channel: Channel, call: Call, execute: Execute[T], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Submit the call. tensors: what `execute` reads and writes."""
        self._execute: Execute[T] | None = execute
        self._tensors = tensors
        self._before = {device: accelerator.record_event(device) for device in _devices_of(tensors)}
        self._after: dict[torch.device, torch.Event] = {}
        self._request = channel.submit(call, self._run)

    def _run(self, group: Group, verdict: Verdict) -> T:
        """Run the call in the thread of the channel."""
        execute, tensors = self._execute, self._tensors
        self._execute, self._tensors = None, ()  # the result may be kept longer than these
        assert execute is not None
        with contextlib.ExitStack() as stack:
            for device, event in self._before.items():
                stream = _own_stream(device)
                stack.enter_context(accelerator.use_stream(stream))
                accelerator.wait_event(device, event)
                for tensor in tensors:
                    if tensor.device == device:
                        accelerator.keep_until_done(tensor, stream)
            result = execute(group, verdict)
            self._after = {device: accelerator.record_event(device) for device in self._before}
        return result

    @property
    def ended(self) -> bool:
        """Whether the call has ended, also on the devices."""
        return self._request.ended and all(event.query() for event in self._after.values())

    def get(self) -> T:
        """Wait for the call, and return its result. The current streams of this thread wait for the devices."""
        result = self._request.get()
        for device, event in self._after.items():
            accelerator.wait_event(device, event)
        for leaf in tree_leaves(result):
            stream = accelerator.current_stream(leaf.device) if isinstance(leaf, torch.Tensor) else None
            if stream is not None and leaf.device in self._after:
                accelerator.keep_until_done(leaf, stream)
        return result
