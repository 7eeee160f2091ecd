"""A double of a device with streams: tensors on the CPU, and a record of what each thread does with its streams."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dualdist import accelerator

__all__ = ("RecordedStreams", "recorded_streams")


class Event:
    """An event that the device reaches when the test says so."""

    def __init__(self, streams: RecordedStreams) -> None:
        self._streams = streams

    def query(self) -> bool:
        return self._streams.reached

    def synchronize(self) -> None:
        self._streams.wait_on_host(self)


class RecordedStreams:
    """Replaces the functions of `accelerator` for streams. A stream is its name."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []
        """(thread, what it did, stream, ...)"""
        self.reached = True
        self.host_may_continue = threading.Event()
        """What a thread waits for that waits for an event."""
        self.host_may_continue.set()
        self._current = threading.local()
        self._names: dict[int, str] = {}
        self._events: list[Event] = []

    def add(self, what: str, *details: Any) -> None:
        thread = "caller" if threading.current_thread() is threading.main_thread() else "worker"
        self.made.append((thread, what, *details))

    def current_stream(self, device: torch.device) -> str:
        thread = "caller's" if threading.current_thread() is threading.main_thread() else "default"
        return getattr(self._current, "stream", f"{thread} stream")

    def new_stream(self, device: torch.device) -> str:
        return "own stream"

    def set_stream(self, stream: str) -> None:
        """Make `stream` the current one of this thread from here on."""
        self._current.stream = stream

    @contextlib.contextmanager
    def use_stream(self, stream: str) -> Iterator[None]:
        before = self.current_stream(torch.device("cpu"))
        self._current.stream = stream
        yield
        self._current.stream = before

    def record_event(self, device: torch.device, stream: str | None = None) -> Event:
        event = Event(self)
        self._events.append(event)
        self.add("records", len(self._events), stream or self.current_stream(device))
        return event

    def wait_event(self, device: torch.device, event: Event) -> None:
        self.add("waits for", self._events.index(event) + 1, self.current_stream(device))

    def wait_on_host(self, event: Event) -> None:
        assert self.host_may_continue.wait(20)
        self.add("waits on the host for", self._events.index(event) + 1)

    def bind(self, device: torch.device) -> None:
        self.add("binds", device)

    def keep_until_done(self, tensor: torch.Tensor, stream: str) -> None:
        self.add("keeps", tensor.data_ptr(), stream)


@contextlib.contextmanager
def recorded_streams() -> Iterator[RecordedStreams]:
    """Use the double in the `with` block."""
    streams = RecordedStreams()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "has_streams", lambda tensor: True)
        order = accelerator.StreamOrder(torch.device("cpu"))
        order.current_handle = lambda: streams.current_stream(torch.device("cpu"))
        patch.setattr(accelerator, "stream_order", lambda device: order)
        for name in (
            "bind",
            "current_stream",
            "new_stream",
            "use_stream",
            "record_event",
            "wait_event",
            "keep_until_done",
        ):
            patch.setattr(accelerator, name, getattr(streams, name))
        yield streams
