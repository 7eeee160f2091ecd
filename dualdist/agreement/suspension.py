"""Notices that no thread of Python could run for a while, as in a process that was stopped (SIGSTOP)."""

from __future__ import annotations

import math
import time

__all__ = ("Suspension",)


class Suspension:
    """Measures how late the regular ticks of a thread come."""

    def __init__(self, seconds: float) -> None:
        """seconds: how long a suspension lasts at least."""
        self._seconds = seconds
        self._next = math.inf
        self._last, self._ended = 0.0, -math.inf
        """How long the last suspension was, and when it ended."""

    def expect_tick(self, pause: float) -> None:
        """Expect `tick` after `pause` seconds. A suspension before the next `tick` delays it."""
        self._next = time.monotonic() + pause

    def tick(self) -> None:
        """Take note of the delay. Until the next `expect_tick`, none is measured."""
        now = time.monotonic()
        if now - self._next >= self._seconds:
            self._last, self._ended = now - self._next, now
        self._next = math.inf

    @property
    def recent(self) -> float | None:
        """How long the last suspension was, in seconds; None without one, or if it ended some time ago."""
        now = time.monotonic()
        if now - self._next >= self._seconds:  # the thread has not had the time to tick
            return now - self._next
        return self._last if now - self._ended < 2 * self._seconds else None
