"""The calls to the operating system that write a checkpoint. Tests replace them, to tear, delay or fail writes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ("FileSystem",)


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
