"""One call at a time in a thread, also when a signal handler interrupts the call.

A handler runs in the main thread, inside the call that it interrupts. A second call there would wait for the first one,
and the first one for the handler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from .call import Call

__all__ = ("in_turn",)

T = TypeVar("T")
P = ParamSpec("P")


class _Turn(threading.local):
    call: Call | None = None


_turn = _Turn()
"""The call that this thread is making."""


def in_turn(call: Call, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return `step(*args, **kwargs)`, which makes `call`. Raises RuntimeError if this thread is in another call."""
    interrupted = _turn.call
    if interrupted is not None:
        raise RuntimeError(
            f"{call.kind} must not be called in a signal handler or destructor that interrupts {interrupted} at "
            f"{interrupted.where}: each would wait for the other. Let the handler set a flag, and check it after each "
            "step. CheckpointManager(signals=) saves a checkpoint and ends the run in this way."
        )
    try:
        _turn.call = call  # inside `try`: a handler that raises may run before any instruction
        return step(*args, **kwargs)
    finally:
        _turn.call = None
