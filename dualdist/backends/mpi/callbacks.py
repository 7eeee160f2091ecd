"""Threads in which futures get their results, and with them the callbacks of the user's program run.

A callback may wait for another collective, as PowerSGD's does. In the progress thread it would wait forever, because
that thread completes all collectives. Whenever every thread is busy, another one starts.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

__all__ = ("callbacks",)


class Callbacks:
    """Runs functions in other threads, in order unless one of them waits."""

    def __init__(self) -> None:
        self._forget_threads()
        os.register_at_fork(after_in_child=self._forget_threads)

    def run(self, function: Callable[[], None]) -> None:
        """Run `function` in a thread of its own, without waiting for it."""
        with self._lock:
            self._queue.put(function)
            if self._num_idle:
                self._num_idle -= 1
                return
        threading.Thread(target=self._work, name="dualdist-mpi-callbacks", daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                self._queue.get()()
            finally:
                with self._lock:
                    self._num_idle += 1

    def _forget_threads(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_idle = 0


callbacks = Callbacks()
"""The single instance of this process."""
