"""Orders collectives on a device with the work of the thread that calls them.

Streams are a property of a thread. The worker thread of a channel has other streams than the caller, so that without
this a collective could read its input before the caller's kernels have written it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from ... import accelerator
from ...agreement.channel import Execute
from ...agreement.result import Result
from ...agreement.verdict import Verdict
from ...backends.base import Group

__all__ = ("Streamed", "StreamedResult", "on_streams_of_caller")

T = TypeVar("T")


class _OwnStreams(threading.local):
    def __init__(self) -> None:
        self._of: dict[torch.device, torch.Stream] = {}

    def on(self, device: torch.device) -> torch.Stream:
        """Return the stream of this thread for asynchronous calls on `device`."""
        if device not in self._of:
            self._of[device] = accelerator.new_stream(device)
        return self._of[device]


_own = _OwnStreams()


def _devices(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    found = [tensor.device for tensor in tensors if accelerator.has_streams(tensor)]
    return sorted(set(found), key=str) if found else found


def on_streams_of_caller(execute: Execute[T], tensors: Sequence[torch.Tensor]) -> Execute[T]:
    """Return `execute` for a synchronous call: on the caller's streams, also in another thread.

    The caller waits, so that its streams get no other work meanwhile. tensors: what `execute` reads and writes.
    """
    devices = _devices(tensors)
    streams = (
        [stream for device in devices if (stream := accelerator.current_stream(device))] if devices else ()
    )
    if not streams:
        return execute
    caller = threading.get_ident()

    def execute_there(group: Group, verdict: Verdict) -> T:
        if threading.get_ident() == caller:
            return execute(group, verdict)
        with contextlib.ExitStack() as stack:
            for stream in streams:
                stack.enter_context(accelerator.use_stream(stream))
            return execute(group, verdict)

    return execute_there


class Streamed(Generic[T]):
    """An asynchronous call on streams of its own: after what the caller's streams had to do when it was submitted."""

    def __init__(self, execute: Execute[T], tensors: Sequence[torch.Tensor]) -> None:
        self._execute: Execute[T] | None = execute
        self._tensors = tensors
        self._before = {device: accelerator.record_event(device) for device in _devices(tensors)}
        self._after: dict[torch.device, torch.Event] = {}

    def execute(self, group: Group, verdict: Verdict) -> T:
        """Run the call in the thread of the channel."""
        execute, tensors = self._execute, self._tensors
        self._execute, self._tensors = None, ()  # the result may be kept longer than these
        assert execute is not None
        with contextlib.ExitStack() as stack:
            for device, event in self._before.items():
                stream = _own.on(device)
                stack.enter_context(accelerator.use_stream(stream))
                accelerator.wait_event(device, event)
                for tensor in tensors:
                    if tensor.device == device:
                        accelerator.keep_until_done(tensor, stream)
            result = execute(group, verdict)
            self._after = {device: accelerator.record_event(device) for device in self._before}
        return result

    def has_ended(self) -> bool:
        """Return whether the devices have done the call, once `execute` has returned. Does not wait."""
        return all(event.query() for event in self._after.values())

    def order_before_caller(self, result: Any) -> None:
        """Make the current streams of this thread wait for the call, which has returned `result`."""
        for device, event in self._after.items():
            accelerator.wait_event(device, event)
        for leaf in tree_leaves(result):
            stream = accelerator.current_stream(leaf.device) if isinstance(leaf, torch.Tensor) else None
            if stream is not None and leaf.device in self._after:
                accelerator.keep_until_done(leaf, stream)


class StreamedResult(Result[T]):
    """The result of a call that runs on streams of its own."""

    def __init__(self, result: Result[T], streamed: Streamed[T]) -> None:
        self._result, self._streamed = result, streamed

    def done(self) -> bool:
        return self._result.done() and self._streamed.has_ended()

    def get(self) -> T:
        value = self._result.get()
        self._streamed.order_before_caller(value)
        return value
