"""The file of a checkpoint: what torch.save writes, with a manifest and a checksum in the comment of the zip archive.

    offset 0          the archive of torch.save: a dictionary of plain containers, numbers, strings and CPU tensors
    size - 2048 - 22  the archive's end record; its last field is the length of the comment, 2048 bytes
    size - 2048       the manifest: JSON, padded with spaces
    size - 15         "crc32 xxxxxxxx\\n": the CRC-32 of every byte before this line

One pass writes the file. `torch.load(path, weights_only=True)` and every zip program read it without dualdist. The
checksum finds any flipped bit. It protects against accidents; weights_only protects against malice, because no code in
a file is ever run.

torch.distributed.checkpoint is not used, for three reasons: it needs a process group of torch, which Horovod does not
have, and a file system that all ranks share; its metadata are a pickle; it has no checksum.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .atomic_file import NewFile, replacing
from .checksum import LINE_BYTES, PIECE_BYTES, Checksum
from .filesystem import FileSystem
from .manifest import COMMENT_BYTES, MAGIC, Manifest, decode, encode
from .opening import damaged, open_checkpoint

__all__ = ("copy_verified", "write_checkpoint")

_END_RECORD = b"PK\5\6"
_END_BYTES = 22


def write_checkpoint(
    path: Path, values: Mapping[str, Any], manifest: Manifest, file_system: FileSystem
) -> None:
    """Write `values`, which must be portable (see contents/portable.py).

    Raises OSError, and ValueError when the manifest is too long.
    """
    comment = encode(manifest)
    with replacing(path, file_system) as file:
        archive = _Archive(file)
        torch.save(dict(values), archive)  # type: ignore[arg-type]
        archive.finish(comment)


class _Archive:
    """The file object for torch.save. It buffers small writes, and keeps the end record until the comment is known."""

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
        """Do nothing. torch.save calls it in the middle."""

    def finish(self, comment: bytes) -> None:
        end = self._pending[-_END_BYTES:]
        assert end.startswith(_END_RECORD) and end.endswith(b"\0\0"), (
            "torch.save has not written a plain zip archive"
        )
        self._pending[-2:] = COMMENT_BYTES.to_bytes(2, "little")
        self._pending += comment
        self._flush(0)
        self._file.write(self._file.checksum.line())

    def _flush(self, kept: int) -> None:
        end = len(self._pending) - kept
        self._file.write(bytes(self._pending[:end]))
        del self._pending[:end]


def copy_verified(path: str | os.PathLike[str], take: Callable[[bytes], object]) -> Manifest:
    """Pass every piece of a checkpoint to `take`, and return its manifest when the checksum matches.

    Raises OSError, DamagedCheckpointError when a byte is not what was written, CheckpointError when the format is newer
    than this version of dualdist.
    """
    checksum, tail = Checksum(), b""
    with open_checkpoint(path) as file:
        left = os.fstat(file.fileno()).st_size - LINE_BYTES
        while left > 0 and (piece := file.read(min(left, PIECE_BYTES))):
            checksum.add(piece)
            tail = (piece if len(piece) >= COMMENT_BYTES else tail + piece)[-COMMENT_BYTES:]
            left -= len(piece)
            take(piece)
        line = file.read(LINE_BYTES)
        take(line)
    comment = tail[LINE_BYTES - COMMENT_BYTES :] + line
    # Without the magic, `decode` reports that there is no manifest.
    if MAGIC.encode() in comment and line != checksum.line():
        raise damaged(path, "its checksum does not match")
    return decode(comment, Path(path))
