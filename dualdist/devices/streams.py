"""Streams of a device, and the order of collectives there with the work of the thread that calls them.

Streams are a property of a thread. The worker thread of a channel has other streams than the caller, so that without
this a collective could read its input before the caller's kernels have written it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from ..core import accelerator
from ..core.accelerator import torch_accelerator
from ..core.agreement.call import Call
from ..core.agreement.channel import Channel
from ..core.agreement.connections import Execute, Verdict
from ..core.backends.base import Group
from ..core.process import Patience, in_thread, wait_for

T = TypeVar("T")


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream of this thread on `device`; None for the CPU."""
    return None if device.type == "cpu" else torch_accelerator.current_stream(device)


def use_stream(stream: torch.Stream) -> contextlib.AbstractContextManager[Any]:
    """Make `stream` and its device the current ones of this thread in the `with` block."""
    if hasattr(stream, "__enter__"):
        return stream
    entered: contextlib.AbstractContextManager[Any] = torch.get_device_module(stream.device).stream(stream)
    return entered


def record_event(device: torch.device, stream: torch.Stream | None = None) -> torch.Event:
    """Return an event after all work on `stream`, or on this thread's stream on `device`."""
    event = torch.Event(device)
    event.record(stream or torch_accelerator.current_stream(device))
    return event


def wait_event(device: torch.device, event: torch.Event) -> None:
    """Make this thread's stream on `device` wait for `event`. The host does not wait."""
    torch_accelerator.current_stream(device).wait_event(event)


def wait_for_device(device: torch.device, patience: Patience) -> None:
    """Wait for this thread's stream on `device`, or until `patience` ends or the device has failed."""
    with contextlib.suppress(RuntimeError):
        wait_for(in_thread(record_event(device).synchronize), patience)


def keep_until_done(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Reuse the memory of `tensor`, dense or COO, only after what `stream` has to do now."""
    for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
        part.record_stream(stream)


def host_memory(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory of the host, ((length,), dtype), for copies from `device`. It is pinned, if possible.

    Copies then do not wait. torch takes a power of two of bytes (CachingHostAllocator.h), and keeps what is freed.
    """
    with contextlib.suppress(RuntimeError):  # the runtime of the device has none, or none left
        return torch.empty(length, dtype=dtype, device="cpu", pin_memory=device.type == accelerator.kind())
    return torch.empty(length, dtype=dtype, device="cpu")


class StreamOrder:
    """Orders streams that one after the other add to the same memory on a device: each waits for the one before it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        raw = getattr(torch._C, f"_{device.type}_getCurrentRawStream", None)
        self.current_handle: Any = (
            functools.partial(raw, device.index) if raw else lambda: current_stream(device).stream_id  # type: ignore[union-attr]
        )
        """Return a number for the current stream of this thread. It is called for each gradient."""
        self.last: int | None = None
        """The number of the stream that came last."""
        self._stream: torch.Stream | None = None
        self._is_mixed = False
        """Whether there was more than one stream. Then memory is used on a stream that did not allocate it."""

    def follow(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        """Make the current stream of this thread wait for the one that came last, and be the last.

        tensors: what it uses then.
        """
        if (handle := self.current_handle()) != self.last:
            if self._stream is not None:
                wait_event(self._device, record_event(self._device, self._stream))
                self._is_mixed = True
            self.last, self._stream = handle, current_stream(self._device)
        if self._is_mixed and (stream := current_stream(self._device)) is not None:
            for tensor in tensors:
                keep_until_done(tensor, stream)


@functools.cache
def stream_order(device: torch.device) -> StreamOrder | None:
    """Return the order of the streams on which gradients of `device` arrive; None without streams.

    Autograd runs all hooks of a device in one thread.
    """
    return StreamOrder(device) if device.type == accelerator.kind() else None


# Collectives on streams.


class _OwnStreams(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[torch.device, torch.Stream] = {}


_own = _OwnStreams()
"""The streams of this thread for asynchronous calls."""


def _own_stream(device: torch.device) -> torch.Stream:
    if device not in _own.by_device:
        _own.by_device[device] = torch.Stream(device)
    return _own.by_device[device]


def _devices_of(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    return sorted({tensor.device for tensor in tensors if accelerator.has_streams(tensor)}, key=str)


def on_streams_of_caller(execute: Execute[T], tensors: Sequence[torch.Tensor]) -> Execute[T]:
    """Return `execute` for a synchronous call: on the caller's streams, also in another thread.

    The caller waits, so that its streams get no other work meanwhile. tensors: what `execute` reads and writes.
    """
    streams = [torch_accelerator.current_stream(device) for device in _devices_of(tensors)]
    caller = threading.get_ident()

    def execute_there(group: Group, verdict: Verdict) -> T:
        with contextlib.ExitStack() as stack:
            for stream in streams if threading.get_ident() != caller else ():
                stack.enter_context(use_stream(stream))
            return execute(group, verdict)

    return execute_there


class Started(Generic[T]):
    """An asynchronous call on streams of its own: after what the caller's streams had to do when it was submitted."""

    def __init__(self, channel: Channel, call: Call, execute: Execute[T], tensors: Sequence[torch.Tensor]) -> None:
        """Submit the call. tensors: what `execute` reads and writes."""
        self._execute: Execute[T] | None = execute
        self._tensors = tensors
        self._before = {device: record_event(device) for device in _devices_of(tensors)}
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
                stack.enter_context(use_stream(stream))
                wait_event(device, event)
                for tensor in tensors:
                    if tensor.device == device:
                        keep_until_done(tensor, stream)
            result = execute(group, verdict)
            self._after = {device: record_event(device) for device in self._before}
        return result

    @property
    def ended(self) -> bool:
        """Whether the call has ended, also on the devices."""
        return self._request.ended and all(event.query() for event in self._after.values())

    def get(self) -> T:
        """Wait for the call, and return its result. The current streams of this thread wait for the devices."""
        result = self._request.get()
        for device, event in self._after.items():
            wait_event(device, event)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device in self._after:
                keep_until_done(leaf, torch_accelerator.current_stream(leaf.device))
        return result
