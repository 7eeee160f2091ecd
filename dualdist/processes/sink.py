"""Writes to one open file in a thread of its own, because a write blocks while nobody reads from a pipe or terminal.

The launcher must honour signals, and notice the ends of processes, whatever happens to its output. Non-blocking writes
cannot be used: O_NONBLOCK belongs to the open file, which the launcher shares with the shell and other programs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

__all__ = ("Sink",)


class Sink:
    """A queue of bytes for the file `descriptor`. `put` never waits."""

    def __init__(self, descriptor: int, notify: Callable[[], None]) -> None:
        """Start the thread. It calls `notify` after each write, and when writing has failed."""
        self.size = 0
        """Number of bytes that are not written yet."""
        self.error: OSError | None = None
        """Why writing has failed. Nothing is written after that."""
        self._descriptor = descriptor
        self._notify = notify
        self._pending: list[bytes] = []
        self._changed = threading.Condition()
        self._closed = False
        # A daemon thread: the interpreter can end while a write blocks.
        self._thread = threading.Thread(target=self._work, name=f"dualdist-output-{descriptor}", daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        """Write `data` after all that was put before."""
        with self._changed:
            self._pending.append(data)
            self.size += len(data)
            self._changed.notify()

    def close(self, seconds: float) -> bool:
        """End the thread when it has written everything. Return whether it ended within `seconds`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while data := self._take():
            view = memoryview(data)
            try:
                while view:
                    view = view[os.write(self._descriptor, view) :]
            except OSError as error:
                self.error = error
                self._notify()
                return
            with self._changed:
                self.size -= len(data)
            self._notify()

    def _take(self) -> bytes:
        """Wait for data and return all of it; nothing after `close`."""
        with self._changed:
            while not self._pending and not self._closed:
                self._changed.wait()
            data = b"".join(self._pending)
            self._pending.clear()
            return data
