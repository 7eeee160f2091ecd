"""The writer, rank 0: it reads and writes the files, and every rank gets its result or its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..checks import text_of
from ..collectives.objects import broadcast_object
from ..errors import CheckpointError, DamagedCheckpointError
from ..world.ranks import rank

__all__ = ("from_writer", "is_writer")

T = TypeVar("T")


def is_writer() -> bool:
    """Return whether this rank reads and writes the files."""
    return rank() == 0


def from_writer(function: Callable[[], T]) -> T:
    """Run `function` on the writer, and return its result on every rank. Collective over the world.

    The result is sent by pickle, so it must be small. When `function` raises, every rank raises CheckpointError, or
    DamagedCheckpointError if `function` did.
    """
    result: T | None = None
    failure: Exception | None = None
    if is_writer():
        try:
            result = function()
        except Exception as raised:
            failure = raised
    error = None if failure is None else _as_error(failure)
    result, error = broadcast_object((result, error), 0)
    if error is not None:
        raise error from failure
    return result


def _as_error(failure: Exception) -> CheckpointError:
    # Of these two classes only: the other ranks must be able to unpickle it.
    if isinstance(failure, CheckpointError):
        kind = DamagedCheckpointError if isinstance(failure, DamagedCheckpointError) else CheckpointError
        return kind(text_of(failure))
    return CheckpointError(f"Rank 0 failed: {type(failure).__name__}: {text_of(failure)}")
