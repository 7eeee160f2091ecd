"""The calls to the operating system that write a checkpoint: a test can tear, delay and fail them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ("FileSystem",)


class FileSystem:
    """Calls `os`, each of which may raise OSError. Subclass it to make them fail; override what should."""

    def create(self, path: Path) -> int:
        """Open a file that must not exist yet, for writing, and return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some of `data` and return how many bytes that was; it may be fewer than all."""
        return os.write(descriptor, data)

    def start_writing(self, descriptor: int, start: int, count: int) -> None:
        """Begin to bring `count` bytes from `start` to the disk, without waiting, so that `sync` has less to do."""
        # Linux begins to write what is dirty: mm/fadvise.c, POSIX_FADV_DONTNEED.
        os.posix_fadvise(descriptor, start, count, os.POSIX_FADV_DONTNEED)

    def sync(self, descriptor: int) -> None:
        """Wait until what was written is on the disk."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a descriptor. Some network file systems report a full disk no sooner."""
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Put `source` in the place of `target` in one stroke."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def make_folder(self, folder: Path) -> None:
        """Make a folder with those above it, unless it is there."""
        folder.mkdir(parents=True, exist_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """Wait until names that were made, changed or removed in `folder` are on the disk."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that have no such thing
                raise
        finally:
            os.close(descriptor)
