"""Files that appear under their name only when they are complete, and checkpoint files opened for reading."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from ..errors import DamagedCheckpointError

# Opens checkpoint files for reading. Only regular files: reading from a FIFO or a device may never end.

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a folder",
}


def damaged(path: object, reason: str) -> DamagedCheckpointError:
    """Return the error for a file that is not a complete checkpoint of dualdist."""
    return DamagedCheckpointError(
        f"`path` must be a checkpoint as dualdist wrote it, but {path} is not: {reason}."
    )


def open_checkpoint(path: str | os.PathLike[str]) -> BinaryIO:
    """Open `path` for reading, without a buffer and without waiting.

    Raises DamagedCheckpointError when it is not a regular file, OSError when it cannot be opened.
    """
    return cast(BinaryIO, open(path, "rb", buffering=0, opener=_open_regular))


def _open_regular(path: str, flags: int) -> int:
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer. It has no effect on regular files.
        descriptor = os.open(path, flags | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:  # open(2): a socket, or a device that is absent
            raise damaged(path, "it is a socket or a device, not a regular file") from error
        raise
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind == stat.S_IFREG:
        return descriptor
    os.close(descriptor)
    raise damaged(path, f"it is {_KINDS.get(kind, 'something else')}, not a regular file")


# Writes a file under a temporary name, and renames it when it is complete.

TEMPORARY_SUFFIX = ".dualdist-tmp"
PIECE_BYTES = 1 << 20
"""Files are summed and written (or read) in pieces of this size, so that the second step finds a piece in the cache."""
_FLUSH_BYTES = 8 << 20
"""After this many bytes the disk starts to write, instead of at the end."""


class NewFile:
    """A file that is being written, and the CRC-32 of its bytes so far."""

    def __init__(self, descriptor: int, durable: bool) -> None:
        self.crc = 0
        self.failure: OSError | None = None
        """The first error of the file system, because torch.save raises another error in its place."""
        self._size = self._flushed = 0
        self._descriptor = descriptor
        self._durable = durable

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of `data` and return its length."""
        view = memoryview(data)
        try:
            for start in range(0, len(view), PIECE_BYTES):
                self._write_piece(view[start : start + PIECE_BYTES])
        except OSError as error:
            self.failure = self.failure or error
            raise
        return len(view)

    def flush(self) -> None:
        """Do nothing. torch.save calls it in the middle."""

    def _write_piece(self, piece: memoryview) -> None:
        if self.failure is not None:
            raise self.failure
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


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[NewFile]:
    """Open a new file for the `with` block; at its end, the file replaces `path`.

    The block writes to a temporary name in the same folder. Then the file is renamed to `path`. At any moment `path` is
    either what it was before or the complete new file. After an exception the temporary file is removed, if the file
    system permits. If `path` is a symbolic link, what it leads to is replaced.

    durable: the file and its new name are on the disk at the end. False: the system decides when they get there. Then
    they survive their process, but not the machine.

    Raises OSError, also if `path` is there, but no regular file.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise FileExistsError(
            errno.EEXIST, "There is a folder or a special file, which is not replaced", str(path)
        )
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    file = NewFile(descriptor, durable)
    try:
        try:
            yield file
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
