"""One call at a time in a thread, also when a signal handler interrupts the call.

A handler runs in the main thread, inside the call that it interrupts. A second call there would wait for the first one,
and the first one for the handler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from .call import Call

__all__ = ("in_turn",)

T = TypeVar("T")


class _Turn(threading.local):
    call: Call | None = None


_turn = _Turn()
"""The call that this thread is making."""


def in_turn(call: Call, step: Callable[[], T]) -> T:
    """Return `step()`, which makes `call`. Raises RuntimeError if this thread is inside another call."""
    interrupted = _turn.call
    if interrupted is not None:
        raise RuntimeError(
            f"{call.kind} must not be called in a signal handler or destructor that interrupts {interrupted} at "
            f"{interrupted.where}: each would wait for the other. Let the handler set a flag, and check it after each "
            "step. CheckpointManager(signals=) saves a checkpoint and ends the run in this way."
        )
    try:
        _turn.call = call  # inside `try`: a handler that raises may run before any instruction
        return step()
    finally:
        _turn.call = None
