"""The file of a checkpoint: what torch.save writes, with a manifest and a checksum in the comment of the zip archive.

    offset 0          the archive of torch.save: a dictionary of plain containers, numbers, strings and CPU tensors
    size - 2048 - 22  the archive's end record; its last field is the length of the comment, 2048 bytes
    size - 2048       the manifest: JSON, padded with spaces
    size - 15         "crc32 xxxxxxxx" and a newline: the CRC-32 of every byte before this line

One pass writes the file, which appears under its name only when it is complete. `torch.load(path, weights_only=True)`
and every zip program read it without dualdist. The checksum finds any flipped bit. It protects against accidents;
weights_only protects against malice, because no code in a file is ever run.

torch.distributed.checkpoint is used for sharded models alone (sharding/checkpoints.py), for three reasons: it needs a
file system that all ranks share; its metadata are a pickle; it has no checksum.
"""

from __future__ import annotations

import codecs
import contextlib
import datetime
import errno
import io
import json
import os
import secrets
import stat
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..core.checks import path as checked_path
from ..core.lifecycle import backend_name, size, transport_name
from ..errors import CheckpointError, DamagedCheckpointError

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a folder",
}


def damaged(path: object, reason: str) -> DamagedCheckpointError:
    """Return the error for a file that is not a complete checkpoint of dualdist."""
    return DamagedCheckpointError(f"`path` must be a checkpoint as dualdist wrote it, but {path} is not: {reason}.")


def open_checkpoint(path: str | os.PathLike[str]) -> io.FileIO:
    """Open `path` for reading, without a buffer.

    Raises OSError, and DamagedCheckpointError when it is not a regular file: to open or read others may never end.
    """
    return open(path, "rb", buffering=0, opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer. It has no effect on regular files.
        descriptor = os.open(path, flags | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:  # open(2): a socket, or a device that is absent
            raise damaged(path, "it is a socket or a device, not a regular file") from error
        raise
    if (kind := stat.S_IFMT(os.fstat(descriptor).st_mode)) != stat.S_IFREG:
        os.close(descriptor)
        raise damaged(path, f"it is {_KINDS.get(kind, 'something else')}, not a regular file")
    return descriptor


# Writes a file under a temporary name, and renames it when it is complete.

TEMPORARY_SUFFIX = ".dualdist-tmp"
PIECE_BYTES = 1 << 20
"""Files are summed and written (or read) in pieces of this size, so that the second step finds a piece in the cache."""
_FLUSH_BYTES = 8 << 20
"""After this many bytes the disk starts to write, instead of at the end."""


class NewFile:
    """A file that is being written. Small writes are collected."""

    def __init__(self, descriptor: int, durable: bool) -> None:
        self.pending = bytearray()
        """The last bytes, which are not written yet: all of the last small write, and of those before it."""
        self.crc = 0
        """The CRC-32 of the bytes before them."""
        self.failure: OSError | None = None
        """The first error of the file system, because torch.save raises another error in its place."""
        self._size = self._flushed = 0
        self._descriptor = descriptor
        self._durable = durable

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of `data`, at the latest with `write_pending`, and return its length."""
        if len(self.pending) + len(data) > PIECE_BYTES:
            self.write_pending()
        if len(data) > PIECE_BYTES:
            self._write(data)
        else:
            self.pending += data
        return len(data)

    def flush(self) -> None:
        """Do nothing. torch.save calls it in the middle."""

    def write_pending(self) -> None:
        """Write what is pending."""
        pending, self.pending = self.pending, bytearray()
        self._write(pending)

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        if self.failure is not None:
            raise self.failure
        try:
            for start in range(0, len(data), PIECE_BYTES):
                piece = memoryview(data)[start : start + PIECE_BYTES]
                self.crc = zlib.crc32(piece, self.crc)
                while piece:
                    written = os.write(self._descriptor, piece)
                    piece = piece[written:]
                    self._size += written
                unflushed = self._size - self._flushed
                if self._durable and unflushed >= _FLUSH_BYTES:
                    # Linux then starts to write dirty pages: mm/fadvise.c, POSIX_FADV_DONTNEED.
                    os.posix_fadvise(self._descriptor, self._flushed, unflushed, os.POSIX_FADV_DONTNEED)
                    self._flushed = self._size
        except OSError as error:
            self.failure = error
            raise


def temporary_name(path: Path) -> Path:
    """Return the path of a hidden file or folder beside `path`, for what is not complete yet, or is to be removed."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[NewFile]:
    """Open a new file for the `with` block; at its end, the file replaces `path`.

    The block writes to a temporary name in the same folder. Then the file is renamed to `path`, which at any moment is
    the old or the complete new file. After an exception the temporary file is removed, if possible. If `path` is a
    symbolic link, what it leads to is replaced. Mode, and if permitted group and owner, stay those of the old file.

    durable: file and name are on the disk at the end. False: later; then they survive their process, not the machine.

    Raises OSError, also if `path` is there, but no regular file.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "There is a folder or a special file, which is not replaced", str(path))
    temporary = temporary_name(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    file = NewFile(descriptor, durable)
    try:
        try:
            if path.exists():
                former = path.stat()
                for owner in (-1, former.st_uid):
                    with contextlib.suppress(PermissionError):
                        os.fchown(descriptor, owner, former.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(former.st_mode))
            yield file
            file.write_pending()
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)  # some network file systems report a full disk only here
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, Exception) and file.failure is not None:
            raise file.failure from None
        raise
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until created, renamed and removed names in `folder` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot sync a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


# The manifest of a checkpoint: what is known about it without loading it, as JSON in the file's last 2048 bytes.

FORMAT = 1
LINE_BYTES = len(b"crc32 00000000\n")
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
    """Return the manifest of a checkpoint that this world saves now."""
    run = size(), backend_name(), transport_name(), str(torch.__version__)
    saved = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return Manifest(step, *run, saved, serial, metrics)


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of a checkpoint, without verifying the rest of the file. Local.

    Raises OSError, DamagedCheckpointError without a manifest, CheckpointError when the format is newer than dualdist.
    """
    with open_checkpoint(checked_path("path", path)) as file:
        return _decode(_read_comment(file), path)


def _read_comment(file: io.FileIO) -> bytes:
    """Return the last COMMENT_BYTES bytes of the file."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - COMMENT_BYTES))
    return file.read(COMMENT_BYTES)


def _decode(comment: bytes, path: object) -> Manifest:
    """Return the manifest in `comment`, the end of the file `path`. Errors as for `read_manifest`."""
    try:
        found = json.loads(comment[:-LINE_BYTES])
        if found.pop("magic") != MAGIC:
            raise ValueError("another magic")
        if found["format"] <= FORMAT:
            return Manifest(**found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if comment.endswith(b"\0\0") and comment[-_END_BYTES:].startswith(_END_RECORD):
            raise CheckpointError(
                f"`path` must be a checkpoint as dualdist wrote it, but {path} is a file of torch.save instead. Load "
                "it with torch.load(path, weights_only=True)."
            ) from error
        raise damaged(path, "it ends without a manifest") from error
    raise CheckpointError(
        f"`path` must be a checkpoint of format {FORMAT} or older, but {path} has format {found['format']} instead. "
        "Load it with a newer dualdist."
    )


def _checksum_line(crc: int) -> bytes:
    """Return the last LINE_BYTES bytes of a checkpoint. CRC-32 detects accidental damage, not tampering."""
    return f"crc32 {crc:08x}\n".encode()


_END_RECORD = b"PK\5\6"
_END_BYTES = 22


def write_checkpoint(path: Path, values: Mapping[str, Any], manifest: Manifest, *, durable: bool = True) -> None:
    """Write `values`, which must be portable (see contents.py). durable: as for `replacing`.

    Raises OSError, and ValueError when the manifest is too long.
    """
    text = json.dumps({"magic": MAGIC, **asdict(manifest)})
    space = COMMENT_BYTES - LINE_BYTES - 1
    if len(text) > space:
        raise ValueError(
            f"`metrics` must fit into {space} bytes of JSON with the rest of the manifest, but need {len(text)} "
            "instead. Keep the numbers by which you choose a checkpoint."
        )
    with replacing(path, durable=durable) as file:
        torch.save(dict(values), file)  # type: ignore[arg-type]
        end = file.pending[-_END_BYTES:]  # torch.save writes the end record last, in one piece
        assert end.startswith(_END_RECORD) and end.endswith(b"\0\0"), "torch.save has not written a plain zip archive"
        file.pending[-2:] = COMMENT_BYTES.to_bytes(2, "little")
        file.write(text.ljust(space).encode() + b"\n")
        file.write_pending()
        file.write(_checksum_line(file.crc))


def copy_verified(path: str | os.PathLike[str], take: Callable[[bytes], object]) -> Manifest:
    """Pass every piece of a checkpoint to `take`, and return its manifest when the checksum matches.

    Raises OSError, DamagedCheckpointError when a byte is not what was written, CheckpointError when the format is newer
    than this version of dualdist.
    """
    crc = 0
    with open_checkpoint(path) as file:
        left = os.fstat(file.fileno()).st_size - LINE_BYTES
        while left > 0 and (piece := file.read(min(left, PIECE_BYTES))):
            crc = zlib.crc32(piece, crc)
            left -= len(piece)
            take(piece)
        take(file.read(LINE_BYTES))
        comment = _read_comment(file)
    # Without the magic, `_decode` reports that there is no manifest.
    if MAGIC.encode() in comment and not comment.endswith(_checksum_line(crc)):
        raise damaged(path, "its checksum does not match")
    return _decode(comment, path)


# A checkpoint's bytes in memory, on their way from the disk of one rank to all ranks.


class MemoryFile(io.FileIO):
    """A file in memory (memfd). torch.load maps it instead of copying; loaded tensors keep the memory after closing.

    The mapping is private: a process that changes a loaded tensor changes a copy of these pages.
    """

    def __init__(self) -> None:
        super().__init__(os.memfd_create("dualdist-checkpoint", os.MFD_CLOEXEC), "w+")

    def append(self, data: bytes | bytearray) -> None:
        """Write all of `data` at the end."""
        view = memoryview(data)
        while view:
            view = view[self.write(view) :]

    def clear(self) -> None:
        """Remove all bytes. No tensor that was loaded from them may be in use."""
        self.seek(0)
        self.truncate()

    def address(self) -> tuple[str, os.stat_result]:
        """Return where the other processes of this host find the file while it is open, and its size and identity."""
        return f"/proc/{os.getpid()}/fd/{self.fileno()}", os.fstat(self.fileno())

    def become(self, path: str, status: os.stat_result) -> bool:
        """Use the file at this address, of another process of this host, in place of this one. Do not write to it here.

        Returns False, without a change, if this process cannot open it.
        """
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as other:
            # A process in a container of its own may know another process by this ID.
            if is_same := os.path.samestat(os.fstat(other.fileno()), status):
                os.dup2(other.fileno(), self.fileno(), inheritable=False)
            return is_same
        return False

    def load(self, name: object) -> dict[str, Any]:
        """Return the values of the checkpoint in this file. name: of the checkpoint, for messages.

        Raises DamagedCheckpointError when it cannot be loaded without running code in it, or is no archive of torch.
        """
        try:
            with warnings.catch_warnings():
                # torch warns that it validates sparse tensors, which is what we want.
                warnings.filterwarnings("ignore", "Validating sparse tensor")
                path = f"/proc/self/fd/{self.fileno()}"
                if not hasattr(torch.serialization, "safe_globals"):  # torch 2.4 refuses bytes and sets
                    torch.serialization.add_safe_globals([codecs.encode, set])
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # type: ignore[no-any-return]
        except Exception as error:
            reason = " ".join(str(error).split()).partition(". ")[0][:200]
            raise DamagedCheckpointError(
                f"`path` must hold only tensors and plain values, but {name} was refused: {reason}."
            ) from error
