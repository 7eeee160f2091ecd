"""Files that appear under their name only when they are complete and on the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from .checksum import PIECE_BYTES, Checksum
from .filesystem import FileSystem

__all__ = ("TEMPORARY_SUFFIX", "NewFile", "replacing")

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
