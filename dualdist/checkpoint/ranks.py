"""What the ranks tell each other about a checkpoint, so that all of them go on, or all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ..collectives import broadcast_
from ..collectives.objects import allgather_object, broadcast_object
from ..errors import CheckpointError
from ..world.numbers import rank
from .storage.memory import MemoryFile

__all__ = ("from_writer", "is_writer", "on_all_ranks", "send_file")

_PIECE_BYTES = 32 << 20

T = TypeVar("T")


def is_writer() -> bool:
    """Return whether this rank reads and writes the files."""
    return rank() == 0


def from_writer(function: Callable[[], T]) -> T:
    """Run `function` on the writer, and return its result on every rank. Collective over the world.

    The result is sent by pickle and must be small. Raises CheckpointError on every rank when it raised on the writer,
    of its own kind (see errors.py) where it was one.
    """
    result: T | None = None
    failure: Exception | None = None
    if is_writer():
        try:
            result = function()
        except Exception as error:
            failure = error
    told = None if failure is None else _as_error(failure)
    result, told = broadcast_object((result, told), 0)
    if told is not None:
        raise told from failure
    return result


def _as_error(failure: Exception) -> CheckpointError:
    if isinstance(failure, CheckpointError):
        return type(failure)(str(failure))
    return CheckpointError(f"Rank 0 failed: {type(failure).__name__}: {failure}")


def on_all_ranks(function: Callable[[], T]) -> list[T]:
    """Run `function`, which calls no collective, on every rank, and return all results. Collective over the world.

    The results are sent by pickle and must be small. A rank on which it raised raises that; the others raise
    CheckpointError, which says where it was and what.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = function()
    except Exception as error:
        failure = error
    answers = allgather_object((result, None if failure is None else f"{type(failure).__name__}: {failure}"))
    if failure is not None:
        raise failure
    failed = [(place, problem) for place, (_, problem) in enumerate(answers) if problem is not None]
    if failed:
        place, problem = failed[0]
        others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        raise CheckpointError(f"Rank {place}{others} failed: {problem}")
    return [result for result, _ in answers]


def send_file(file: MemoryFile, size: int, root: int) -> None:
    """Give every rank the `file` of `size` bytes that `root` has, in pieces of 32 MiB. Collective over the world."""
    for start in range(0, size, _PIECE_BYTES):
        count = min(_PIECE_BYTES, size - start)
        piece = bytearray(file.read(start, count)) if rank() == root else bytearray(count)
        broadcast_(torch.frombuffer(piece, dtype=torch.uint8), root)
        if rank() != root:
            file.write(piece)
