"""How states and files move between the ranks that see the disk, mostly rank 0 alone, and all other ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from ..checks import text_of
from ..collectives.broadcast import broadcast_
from ..collectives.join import barrier
from ..collectives.objects import allgather_object, gather_object, on_all_ranks
from ..errors import CheckpointError, DamagedCheckpointError
from ..meeting.addresses import own_node
from ..world.ranks import rank
from .catalog import CatalogEntry
from .contents import check_state, collect, collect_own, few, on_host
from .format import MemoryAddress, MemoryFile

T = TypeVar("T")


def attempted(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of `function`, or its exception."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def outcomes(function: Callable[[], T] | None) -> list[Any]:
    """Run `function` on the ranks that pass one, and return every rank's result, in rank order.

    Collective over the world. The results are sent by pickle, so they must be small. When `function` raises on a rank,
    every rank raises CheckpointError, or DamagedCheckpointError if `function` did.
    """
    result, failure = (None, None) if function is None else attempted(function)
    text = reported(failure, rank())
    # Of these two classes only: the other ranks must be able to unpickle it.
    kind = DamagedCheckpointError if isinstance(failure, DamagedCheckpointError) else CheckpointError
    gathered = allgather_object((result, None if text is None else kind(text)))
    for _, error in gathered:
        if error is not None:
            raise error from failure
    return [result for result, _ in gathered]


def reported(failure: Exception | None, rank: int) -> str | None:
    """Return the text of the error that the other ranks raise because of the `failure` of `rank`; None without one."""
    if failure is None or isinstance(failure, CheckpointError):
        return None if failure is None else text_of(failure)
    return f"Rank {rank} failed: {type(failure).__name__}: {text_of(failure)}"


def is_writer() -> bool:
    """Return whether this rank, rank 0, writes and reads the files."""
    return rank() == 0


def from_writer(function: Callable[[], T]) -> T:
    """Run `function` on the writer, and return its result on every rank. Collective, with errors as for `outcomes`."""
    result: T = outcomes(function if is_writer() else None)[0]
    return result


def write_state(
    state: Mapping[str, Any],
    write: Callable[[dict[str, Any]], object],
    check: Callable[[], object] = lambda: None,
) -> None:
    """Collect the values of `state` on the writer, and call `write` with them there. Collective over the world.

    check: raises an error if another argument is wrong on this rank.

    Raises the error of `check`, and TypeError when `state` is wrong, on this rank, CheckpointError on the others;
    ValueError on every rank when the names in `state` differ; otherwise errors as for `outcomes`.
    """

    def checked() -> list[str]:
        check()
        return check_state(state)

    names, wrong = attempted(checked)
    own, failure = (None, wrong) if wrong else attempted(lambda: on_host(collect_own(state), "state"))
    gathered = gather_object((names, own, reported(failure, rank()))) or []

    def write_gathered() -> str:
        for _, _, problem in gathered:
            if problem is not None:
                raise CheckpointError(problem)
        for place, (names, _, _) in enumerate(gathered):
            if names != gathered[0][0]:
                return f"ranks 0 and {place} differ in {few(sorted(set(names) ^ set(gathered[0][0])))}"
        write(collect(state, [own for _, own, _ in gathered]))
        return ""

    try:
        differing = from_writer(write_gathered)
    except CheckpointError:
        if wrong is not None:
            raise wrong from None
        raise
    if differing:
        raise ValueError(f"`state` must have the same names on all ranks, but {differing}.")


class _FoundFile(NamedTuple):
    node: str
    entry: CatalogEntry | None
    size: int
    address: MemoryAddress


_PIECE_BYTES = 32 << 20


def receive_newest(
    find: Callable[[MemoryFile], CatalogEntry | None] | None,
) -> tuple[int, CatalogEntry, dict[str, Any]] | None:
    """Load the newest checkpoint that a rank finds, on every rank. Collective over the world.

    Each host holds the file in memory once.

    find: copies a checkpoint into the file and returns its entry, or returns None; None on ranks that do not look.

    Returns the rank that has found it, its entry and its values; None when no rank has found any. Errors as for
    `outcomes`, and DamagedCheckpointError when it cannot be loaded on this rank.
    """
    with MemoryFile() as file:

        def look() -> _FoundFile:
            entry = None if find is None else find(file)
            return _FoundFile(own_node(), entry, os.fstat(file.fileno()).st_size, file.address())

        found: list[_FoundFile] = outcomes(look)
        serials = [-1 if each.entry is None else each.entry.manifest.serial for each in found]
        root = serials.index(max(serials))
        entry = found[root].entry
        if entry is None:
            return None
        _send_file(file, found, root)
        values: list[dict[str, Any]] = []
        on_all_ranks(lambda: values.append(file.load(entry.path)), CheckpointError)
        return root, entry, values[0]


def _send_file(file: MemoryFile, found: list[_FoundFile], root: int) -> None:
    """Copy the `file` of rank `root` to all hosts, in pieces of 32 MiB.

    On each host one rank keeps it, and the others use that rank's file. A rank that cannot open it keeps its own.
    """
    on_host = [place for place, each in enumerate(found) if each.node == found[rank()].node]
    keeper = root if root in on_host else on_host[0]
    is_kept = rank() != root and (rank() == keeper or not file.become(found[keeper].address))
    if is_kept:
        file.clear()
    for start in range(0, found[root].size, _PIECE_BYTES):
        count = min(_PIECE_BYTES, found[root].size - start)
        piece = bytearray(os.pread(file.fileno(), count, start)) if rank() == root else bytearray(count)
        broadcast_(torch.frombuffer(piece, dtype=torch.uint8), root)
        if is_kept:
            file.append(piece)
    barrier()  # the files are complete
