"""Signals that announce the end of a job: recorded when they arrive, handled between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

__all__ = ("Preempted", "SignalWatch")


class Preempted(SystemExit):
    """The job was asked to end, and its state is saved. It ends the process with `exit_code`, unless it is caught."""

    def __init__(self, exit_code: int, number: int) -> None:
        super().__init__(exit_code)
        self.number = number
        """The signal."""


class SignalWatch:
    """Records the last of the signals `numbers` that this process received, instead of ending."""

    def __init__(self, numbers: Sequence[int]) -> None:
        """Install the handlers. Raises ValueError outside the main thread, where Python does not allow it."""
        if numbers and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "`signals` must be () outside the main thread, but are given. Make the manager in the main thread."
            )
        self.received = 0
        """The number of the received signal; 0: none."""
        self._previous: dict[int, Any] = {number: signal.signal(number, self._note) for number in numbers}

    def restore(self) -> None:
        """Install the former handlers again."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
