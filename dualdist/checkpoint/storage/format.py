"""The file of a checkpoint: what torch.save writes, with a manifest and a checksum in the comment of the zip archive.

    offset 0          the archive of torch.save: a dictionary of plain containers, numbers, strings and CPU tensors
    size - 2048 - 22  the archive's end record, whose last field says that a comment of 2048 bytes follows
    size - 2048       the manifest: JSON, padded with spaces
    size - 15         "crc32 xxxxxxxx\\n": the CRC-32 of every byte before this line

So one pass writes it, `torch.load(path, weights_only=True)` and every zip program read it without dualdist, and a bit
that flips anywhere is noticed: in the line by the line, elsewhere by the sum. The sum is there for accidents. Against
malice stands weights_only: nothing in a file is ever run.

torch.distributed.checkpoint is not used: it needs a process group of torch, which Horovod does not have, on a file
system that every rank sees, its metadata are a pickle, and it has no checksum.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError, DamagedCheckpointError
from .file import PIECE_BYTES, NewFile, replacing
from .filesystem import FileSystem

__all__ = ("FORMAT", "Manifest", "copy_verified", "read_manifest", "write_checkpoint")

FORMAT = 1
_MAGIC = "dualdist checkpoint"
_COMMENT_BYTES = 2048
"""torch looks for the end record in the last 4096 bytes, and fails for small files when it is further up."""
_END_RECORD = b"PK\5\6"
_END_BYTES = 22
_NO_MANIFEST = "it ends without a manifest"
_SUM_LINE_BYTES = len(b"crc32 00000000\n")


@dataclass(frozen=True)
class Manifest:
    """What is known of a checkpoint without loading it."""

    step: int | None
    world_size: int
    backend: str
    transport: str
    torch: str
    saved: str
    """When, in UTC: 2026-01-31T12:00:00+00:00."""
    serial: int = 0
    """Counts the checkpoints of a folder in the order in which they were saved."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    format: int = FORMAT


def write_checkpoint(
    path: Path, values: Mapping[str, Any], manifest: Manifest, file_system: FileSystem
) -> None:
    """Write `values`, which must be portable (see portable.py). Raises OSError, and ValueError for the manifest."""
    comment = _encode(manifest)
    with replacing(path, file_system) as file:
        archive = _Archive(file)
        torch.save(dict(values), archive)  # type: ignore[arg-type]
        archive.finish(comment)


def _encode(manifest: Manifest) -> bytes:
    text = json.dumps({"magic": _MAGIC, **asdict(manifest)})
    space = _COMMENT_BYTES - _SUM_LINE_BYTES - 1
    if len(text) > space:
        raise ValueError(
            f"`metrics` must fit into {space} bytes of JSON with the rest of the manifest, but need {len(text)} "
            "instead. Keep the numbers by which you choose a checkpoint."
        )
    return text.ljust(space).encode() + b"\n"


class _Archive:
    """The file that torch.save sees: gathers small writes, and holds back the end record to let it have a comment."""

    def __init__(self, file: NewFile) -> None:
        self._file = file
        self._pending = bytearray()

    def write(self, data: Any) -> int:
        length = len(data)
        if length >= PIECE_BYTES:
            self._flush(0)
            self._file.write(data[:-_END_BYTES])
            data = data[-_END_BYTES:]
        self._pending += data
        if len(self._pending) >= PIECE_BYTES:
            self._flush(_END_BYTES)
        return length

    def flush(self) -> None:
        """Do nothing: torch.save asks for it in the middle."""

    def finish(self, comment: bytes) -> None:
        end = self._pending[-_END_BYTES:]
        assert end.startswith(_END_RECORD) and end.endswith(b"\0\0"), (
            "torch.save has written no plain zip archive"
        )
        self._pending[-2:] = _COMMENT_BYTES.to_bytes(2, "little")
        self._pending += comment
        self._flush(0)
        self._file.write(_sum_line(self._file.crc))

    def _flush(self, kept: int) -> None:
        end = len(self._pending) - kept
        self._file.write(bytes(self._pending[:end]))
        del self._pending[:end]


def _sum_line(crc: int) -> bytes:
    return f"crc32 {crc:08x}\n".encode()


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of a checkpoint, without a check of what is before it. Local.

    Raises OSError, DamagedCheckpointError when there is none, CheckpointError for a format of the future.
    """
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _COMMENT_BYTES))
        return _decode(file.read(_COMMENT_BYTES), Path(path))


def _decode(comment: bytes, path: Path) -> Manifest:
    try:
        found = json.loads(comment[:-_SUM_LINE_BYTES])
        if found.pop("magic") != _MAGIC:
            raise ValueError("another magic")
        if found["format"] <= FORMAT:
            return Manifest(**found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, _NO_MANIFEST) from error
    raise CheckpointError(
        f"`path` must be a checkpoint of format {FORMAT} or older, but {path} has format {found['format']} instead. "
        "Load it with a newer dualdist."
    )


def _damaged(path: object, reason: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"`path` must be a checkpoint as dualdist wrote it, but {path} is not: {reason}."
    )


def copy_verified(path: str | os.PathLike[str], take: Callable[[bytes], object]) -> Manifest:
    """Give every piece of a checkpoint to `take`, and return its manifest once all of it is known to be sound.

    Raises OSError, and DamagedCheckpointError when a byte is not what was written.
    """
    crc, tail = 0, b""
    with open(path, "rb", buffering=0) as file:
        left = os.fstat(file.fileno()).st_size - _SUM_LINE_BYTES
        while left > 0 and (piece := file.read(min(left, PIECE_BYTES))):
            crc = zlib.crc32(piece, crc)
            tail = (piece if len(piece) >= _COMMENT_BYTES else tail + piece)[-_COMMENT_BYTES:]
            left -= len(piece)
            take(piece)
        line = file.read(_SUM_LINE_BYTES)
        take(line)
    comment = tail[_SUM_LINE_BYTES - _COMMENT_BYTES :] + line
    if line != _sum_line(crc):
        raise _damaged(path, "its checksum does not fit" if _MAGIC.encode() in comment else _NO_MANIFEST)
    return _decode(comment, Path(path))
