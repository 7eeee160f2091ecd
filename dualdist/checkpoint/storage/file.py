"""Files that appear under their name only when they are complete and on the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import zlib
from collections.abc import Iterator
from pathlib import Path

from .filesystem import FileSystem

__all__ = ("PIECE_BYTES", "TEMPORARY_SUFFIX", "NewFile", "replacing")

TEMPORARY_SUFFIX = ".dualdist-tmp"
PIECE_BYTES = 1 << 20
"""Checksum and write take turns on pieces of this size, so that the second finds its data in the cache."""
_START_BYTES = 8 << 20
"""The disk is set to work whenever so much has come, instead of at the end."""


class NewFile:
    """A file being written, and the CRC-32 of what it holds so far."""

    def __init__(self, descriptor: int, file_system: FileSystem) -> None:
        self.crc = 0
        self.failure: OSError | None = None
        """What the file system said; torch.save raises another error in its place."""
        self._size = self._started = 0
        self._descriptor = descriptor
        self._file_system = file_system

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of `data` and return its length."""
        view = memoryview(data)
        try:
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                self.crc = zlib.crc32(piece, self.crc)
                self._write_piece(piece)
        except OSError as error:
            self.failure = self.failure or error
            raise
        return len(view)

    def flush(self) -> None:
        """Do nothing: torch.save asks for it in the middle."""

    def _write_piece(self, piece: memoryview) -> None:
        if self.failure is not None:
            raise self.failure
        while piece:
            written = self._file_system.write(self._descriptor, piece)
            if written <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            piece = piece[written:]
            self._size += written
        if self._size - self._started >= _START_BYTES:
            self._file_system.start_writing(self._descriptor, self._started, self._size - self._started)
            self._started = self._size


@contextlib.contextmanager
def replacing(path: Path, file_system: FileSystem) -> Iterator[NewFile]:
    """Let the body write a file that then takes the place of `path`.

    The file is written under another name beside it, brought to the disk, renamed, and its name brought to the disk:
    at any moment `path` is what it was before, or complete. After an exception the other name is gone, where the file
    system lets it go. Raises OSError.
    """
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
