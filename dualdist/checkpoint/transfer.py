"""How states and files move between the writer and the other ranks, which need not see the disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..collectives import broadcast_
from ..collectives.objects import broadcast_object, gather_object
from ..collectives.on_all_ranks import on_all_ranks
from ..errors import CheckpointError
from ..world.ranks import rank
from .contents.collecting import collect_own
from .contents.host_copy import on_host
from .storage.format import copy_verified
from .storage.manifest import Manifest
from .storage.memory_file import MemoryFile
from .writer import from_writer

__all__ = ("gather_own", "read_file", "read_values")

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
        raise CheckpointError(f"`path` must be a checkpoint that can be read, but {error}.") from error


def read_values(file: MemoryFile, origin: object, root: int = 0) -> dict[str, Any]:
    """Return on every rank the values in the verified `file` of rank `root`. Collective over the world.

    origin: the checkpoint's name, for messages.
    """
    _send_file(file, broadcast_object(file.size, root), root)
    values: list[dict[str, Any]] = []
    on_all_ranks(lambda: values.append(file.load(origin)), CheckpointError)
    return values[0]


def _send_file(file: MemoryFile, size: int, root: int) -> None:
    """Copy the `file` of rank `root`, `size` bytes, to all ranks, in pieces of 32 MiB."""
    for start in range(0, size, _PIECE_BYTES):
        count = min(_PIECE_BYTES, size - start)
        piece = bytearray(file.read(start, count)) if rank() == root else bytearray(count)
        broadcast_(torch.frombuffer(piece, dtype=torch.uint8), root)
        if rank() != root:
            file.write(piece)
