"""Files that appear under their name only when they are complete and on the disk."""

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

# The checksum of a checkpoint: the CRC-32 of all bytes before the file's last line, which holds it in text.

LINE_BYTES = len(b"crc32 00000000\n")
PIECE_BYTES = 1 << 20
"""Files are summed and written (or read) in pieces of this size, so that the second step finds a piece in the cache."""


class Checksum:
    """The CRC-32 of all bytes that were added so far. It detects accidental damage, not tampering."""

    def __init__(self) -> None:
        self._crc = 0

    def add(self, data: bytes | memoryview) -> None:
        """Include `data`."""
        self._crc = zlib.crc32(data, self._crc)

    def line(self) -> bytes:
        """Return the line of LINE_BYTES bytes that ends a checkpoint."""
        return f"crc32 {self._crc:08x}\n".encode()


# The calls to the operating system that write a checkpoint. Tests replace them, to tear, delay or fail writes.


class FileSystem:
    """Calls functions of `os`; each may raise OSError. A subclass can override some of the calls."""

    def create(self, path: Path) -> int:
        """Create a file for writing, and return its descriptor. The file must not exist yet."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some bytes of `data`, and return how many; there may be fewer than all."""
        return os.write(descriptor, data)

    def start_writing(self, descriptor: int, start: int, count: int) -> None:
        """Start writing `count` bytes from `start` to the disk, without waiting, so that `sync` has less to do."""
        # Linux then starts to write dirty pages: mm/fadvise.c, POSIX_FADV_DONTNEED.
        os.posix_fadvise(descriptor, start, count, os.POSIX_FADV_DONTNEED)

    def sync(self, descriptor: int) -> None:
        """Wait until the written bytes are on the disk."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a descriptor. Some network file systems report a full disk only here."""
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename `source` to `target`, and replace it atomically."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def make_folder(self, folder: Path) -> None:
        """Make a folder and its parents, if they do not exist."""
        folder.mkdir(parents=True, exist_ok=True)

    def sync_folder(self, folder: Path) -> None:
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


TEMPORARY_SUFFIX = ".dualdist-tmp"
_FLUSH_BYTES = 8 << 20
"""After this many bytes the disk starts to write, instead of at the end."""


class NewFile:
    """A file that is being written, and the checksum of its bytes so far."""

    def __init__(self, descriptor: int, file_system: FileSystem) -> None:
        self.checksum = Checksum()
        self.failure: OSError | None = None
        """The first error of the file system, because torch.save raises another error in its place."""
        self._size = self._flushed = 0
        self._descriptor = descriptor
        self._file_system = file_system

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of `data` and return its length."""
        view = memoryview(data)
        try:
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                self.checksum.add(piece)
                self._write_piece(piece)
        except OSError as error:
            self.failure = self.failure or error
            raise
        return len(view)

    def flush(self) -> None:
        """Do nothing. torch.save calls it in the middle."""

    def _write_piece(self, piece: memoryview) -> None:
        if self.failure is not None:
            raise self.failure
        while piece:
            written = self._file_system.write(self._descriptor, piece)
            if written <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            piece = piece[written:]
            self._size += written
        if self._size - self._flushed >= _FLUSH_BYTES:
            self._file_system.start_writing(self._descriptor, self._flushed, self._size - self._flushed)
            self._flushed = self._size


@contextlib.contextmanager
def replacing(path: Path, file_system: FileSystem) -> Iterator[NewFile]:
    """Open a new file for the `with` block; at its end, the file replaces `path`.

    The block writes to a temporary name in the same folder. Then the file is synced, renamed to `path`, and the folder
    is synced. At any moment `path` is either what it was before or the complete new file. After an exception the
    temporary file is removed, if the file system permits. If `path` is a symbolic link, what it leads to is replaced.
    Raises OSError, also if `path` is there, but no regular file.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise FileExistsError(
            errno.EEXIST, "There is a folder or a special file, which is not replaced", str(path)
        )
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    descriptor = file_system.create(temporary)
    file = NewFile(descriptor, file_system)
    try:
        try:
            yield file
            file_system.sync(descriptor)
        finally:
            file_system.close(descriptor)
        file_system.rename(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            file_system.remove(temporary)
        if isinstance(error, Exception) and file.failure is not None:
            raise file.failure from None
        raise
    file_system.sync_folder(path.parent)
