"""The file of a checkpoint: what torch.save writes, with a manifest and a checksum in the comment of the zip archive.

    offset 0          the archive of torch.save: a dictionary of plain containers, numbers, strings and CPU tensors
    size - 2048 - 22  the archive's end record; its last field is the length of the comment, 2048 bytes
    size - 2048       the manifest: JSON, padded with spaces
    size - 15         "crc32 xxxxxxxx\n": the CRC-32 of every byte before this line

One pass writes the file. `torch.load(path, weights_only=True)` and every zip program read it without dualdist. The
checksum finds any flipped bit. It protects against accidents; weights_only protects against malice, because no code in
a file is ever run.

torch.distributed.checkpoint is not used, for three reasons: it needs a process group of torch, which Horovod does not
have, and a file system that all ranks share; its metadata are a pickle; it has no checksum.
"""

from __future__ import annotations

import datetime
import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from ..checks import path as checked_path
from ..errors import CheckpointError, DamagedCheckpointError
from ..world.ranks import backend_name, size, transport_name
from .files import LINE_BYTES, PIECE_BYTES, Checksum, FileSystem, NewFile, damaged, open_checkpoint, replacing

# A checkpoint's bytes in memory, on their way from the disk of one rank to all ranks.

_DESCRIPTORS = "/proc/{}/fd/{}"
"""Where a process finds the open files of another one of its user."""


class Place(NamedTuple):
    """Where the other processes of a host find a MemoryFile, while it is open."""

    process_id: int
    descriptor: int
    identity: tuple[int, int]
    """Device and inode. A process in a container of its own may know another process by this ID."""


class MemoryFile:
    """A file in memory (memfd). torch.load maps it instead of copying; loaded tensors keep the memory after closing.

    The mapping is private: a process that changes a loaded tensor changes a copy of these pages.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("dualdist-checkpoint", os.MFD_CLOEXEC)

    def __enter__(self) -> MemoryFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`."""
        view = memoryview(data)
        while view:
            written = os.write(self._descriptor, view)
            view = view[written:]

    @property
    def size(self) -> int:
        """The length in bytes."""
        return os.fstat(self._descriptor).st_size

    @property
    def place(self) -> Place:
        """Where the other processes of this host find the file."""
        status = os.fstat(self._descriptor)
        return Place(os.getpid(), self._descriptor, (status.st_dev, status.st_ino))

    def become(self, place: Place) -> bool:
        """Use the file at `place`, of another process of this host, in place of this one. It must not be written here.

        Returns False, without a change, if this process cannot open it.
        """
        try:
            opened = os.open(
                _DESCRIPTORS.format(place.process_id, place.descriptor), os.O_RDONLY | os.O_CLOEXEC
            )
        except OSError:
            return False
        status = os.fstat(opened)
        if (status.st_dev, status.st_ino) != place.identity:
            os.close(opened)
            return False
        os.close(self._descriptor)
        self._descriptor = opened
        return True

    def clear(self) -> None:
        """Remove all bytes. No tensor that was loaded from them may be in use."""
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        os.ftruncate(self._descriptor, 0)

    def read(self, start: int, count: int) -> bytes:
        """Return up to `count` bytes from `start`."""
        return os.pread(self._descriptor, count, start)

    def load(self, name: object) -> dict[str, Any]:
        """Return the values of the checkpoint in this file. name: of the checkpoint, for messages.

        Raises DamagedCheckpointError when it cannot be loaded without running code in it, or is no archive of torch.
        """
        try:
            with warnings.catch_warnings():
                # torch warns that it validates sparse tensors, which is what we want.
                warnings.filterwarnings("ignore", "Validating sparse tensor")
                path = f"/proc/self/fd/{self._descriptor}"
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            reason = " ".join(str(error).split()).partition(". ")[0][:200]
            raise DamagedCheckpointError(
                f"`path` must hold only tensors and plain values, but {name} was refused: {reason}."
            ) from error
        if not isinstance(loaded, dict):
            raise CheckpointError(
                f"`path` must hold a dictionary, but {name} holds a {type(loaded).__name__} instead."
            )
        return loaded


# The manifest of a checkpoint: what is known about it without loading it, as JSON in the file's last 2048 bytes.

FORMAT = 1
COMMENT_BYTES = 2048
"""Bytes of the manifest with the checksum line. torch searches the archive's end record in the last 4096 bytes of the
file; with a longer comment it does not find the record in small files."""
MAGIC = "dualdist checkpoint"


@dataclass(frozen=True)
class Manifest:
    """What is known about a checkpoint without loading it."""

    step: int | None
    world_size: int
    backend: str
    transport: str
    torch: str
    saved: str
    """When it was saved, in UTC: 2026-01-31T12:00:00+00:00."""
    serial: int = 0
    """Numbers the checkpoints of a folder in the order in which they were saved."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    format: int = FORMAT


def make_manifest(step: int | None, metrics: Mapping[str, float], serial: int = 0) -> Manifest:
    """Return the manifest of a checkpoint that this world saves now.

    Raises TypeError or ValueError for a metric that is not a number.
    """
    return Manifest(
        step,
        size(),
        backend_name(),
        transport_name(),
        str(torch.__version__),
        datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        serial,
        {name: float(value) for name, value in metrics.items()},
    )


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as the file holds it, without the checksum line. Raises ValueError when it is too long."""
    text = json.dumps({"magic": MAGIC, **asdict(manifest)})
    space = COMMENT_BYTES - LINE_BYTES - 1
    if len(text) > space:
        raise ValueError(
            f"`metrics` must fit into {space} bytes of JSON with the rest of the manifest, but need {len(text)} "
            "instead. Keep the numbers by which you choose a checkpoint."
        )
    return text.ljust(space).encode() + b"\n"


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of a checkpoint, without verifying the rest of the file. Local.

    Raises OSError, DamagedCheckpointError when there is no manifest, CheckpointError when the format is newer than
    this version of dualdist.
    """
    with open_checkpoint(checked_path("path", path)) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - COMMENT_BYTES))
        return decode(file.read(COMMENT_BYTES), Path(path))


def decode(comment: bytes, path: Path) -> Manifest:
    """Return the manifest in `comment`, the last COMMENT_BYTES bytes of the file. Errors as for `read_manifest`."""
    try:
        found = json.loads(comment[:-LINE_BYTES])
        if found.pop("magic") != MAGIC:
            raise ValueError("another magic")
        if found["format"] <= FORMAT:
            return Manifest(**found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(path, "it ends without a manifest") from error
    raise CheckpointError(
        f"`path` must be a checkpoint of format {FORMAT} or older, but {path} has format {found['format']} instead. "
        "Load it with a newer dualdist."
    )


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
