"""How states and files move between the writer and the other ranks, which need not see the disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..collectives import barrier, broadcast_
from ..collectives.objects import allgather_object, gather_object
from ..collectives.on_all_ranks import on_all_ranks
from ..errors import CheckpointError
from ..rendezvous import own_node
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
