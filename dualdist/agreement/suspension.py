"""Notices that no thread of Python could run for a while, as in a process that was stopped (SIGSTOP)."""

from __future__ import annotations

import time

__all__ = ("Suspension",)


class Suspension:
    """Measures the time between the regular ticks of a thread."""

    def __init__(self, seconds: float) -> None:
        """seconds: how long a suspension lasts at least."""
        self._seconds = seconds
        self._longest = 0.0
        self._next = float("inf")

    def expect_tick(self, pause: float) -> None:
        """Expect `tick` after `pause` seconds. A suspension before the next `tick` delays it."""
        self._next = time.monotonic() + pause

    def tick(self) -> None:
        """Take note of the delay. Until the next `expect_tick`, none is measured."""
        self._longest, self._next = max(self._longest, self._delay()), float("inf")

    @property
    def longest(self) -> float | None:
        """The longest suspension until now in seconds; None without one. Correct before the delayed tick, too."""
        longest = max(self._longest, self._delay())
        return longest if longest >= self._seconds else None

    def _delay(self) -> float:
        return time.monotonic() - self._next
