"""How states and files move between the writer and the other ranks, which need not see the disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..checks import text_of
from ..collectives import barrier, broadcast_
from ..collectives.objects import allgather_object, broadcast_object, gather_object, on_all_ranks
from ..errors import CheckpointError, DamagedCheckpointError
from ..meeting import own_node
from ..world.ranks import rank
from .contents import collect_own, on_host
from .format import Manifest, MemoryFile, copy_verified

# The writer, rank 0: it reads and writes the files, and every rank gets its result or its error.

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


_PIECE_BYTES = 32 << 20


def gather_own(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each rank's own states on the writer, an empty list elsewhere. Collective over the world."""
    problem, own = None, {}
    try:
        own = on_host(collect_own(state), "state")
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    gathered = gather_object((problem, own)) or []

    def check() -> None:
        for place, (problem, _) in enumerate(gathered):
            if problem is not None:
                raise CheckpointError(f"Rank {place} failed: {problem}")

    from_writer(check)
    return [own for _, own in gathered]


def read_file(path: Path, file: MemoryFile) -> Manifest:
    """Copy a checkpoint into `file`, and return its manifest. Local. Raises CheckpointError when it is damaged."""
    try:
        return copy_verified(path, file.write)
    except OSError as error:
        raise CheckpointError(f"`path` could not be read as a checkpoint: {error}.") from error


def read_values(file: MemoryFile, origin: object, root: int = 0) -> dict[str, Any]:
    """Return on every rank the values in the verified `file` of rank `root`. Collective over the world.

    Each host holds the file in memory once.

    origin: the checkpoint's name, for messages.
    """
    size, is_kept = _share(file, root)
    _send_file(file, size, root, is_kept)
    barrier()  # the files are complete
    values: list[dict[str, Any]] = []
    on_all_ranks(lambda: values.append(file.load(origin)), CheckpointError)
    return values[0]


def _share(file: MemoryFile, root: int) -> tuple[int, bool]:
    """Let the ranks of each host use one file. Return the size of rank `root`'s, and whether this rank writes its own.

    Rank `root` keeps its file, and else the first rank of a host. A rank that cannot open that file keeps its own.
    """
    offers = allgather_object((own_node(), file.size, file.place))
    on_host = [other for other, (node, _, _) in enumerate(offers) if node == offers[rank()][0]]
    keeper = root if root in on_host else on_host[0]
    is_kept = rank() == keeper or not file.become(offers[keeper][2])
    return offers[root][1], is_kept


def _send_file(file: MemoryFile, size: int, root: int, is_kept: bool) -> None:
    """Copy the `file` of rank `root`, `size` bytes, to all ranks, in pieces of 32 MiB. is_kept: whether to write it."""
    for start in range(0, size, _PIECE_BYTES):
        count = min(_PIECE_BYTES, size - start)
        piece = bytearray(file.read(start, count)) if rank() == root else bytearray(count)
        broadcast_(torch.frombuffer(piece, dtype=torch.uint8), root)
        if is_kept and rank() != root:
            file.write(piece)
