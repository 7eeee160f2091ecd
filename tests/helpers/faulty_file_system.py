"""A file system that tears, delays and fails what a checkpoint asks of it, at chosen operations."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dualdist.checkpoint import FileSystem

__all__ = ("CountingFileSystem", "FaultyFileSystem", "PowerCut")

T = TypeVar("T")


class CountingFileSystem(FileSystem):
    """Calls `at(number, name)` before every operation, counted from 1; it may raise, or end the process."""

    def __init__(self, at: Callable[[int, str], None] | None = None) -> None:
        self.count = 0
        self._at = at

    def create(self, path: Path) -> int:
        return self._do("create", lambda: super(CountingFileSystem, self).create(path))

    def write(self, descriptor: int, data: memoryview) -> int:
        return self._do("write", lambda: super(CountingFileSystem, self).write(descriptor, data))

    def sync(self, descriptor: int) -> None:
        self._do("sync", lambda: super(CountingFileSystem, self).sync(descriptor))

    def close(self, descriptor: int) -> None:
        self._do("close", lambda: super(CountingFileSystem, self).close(descriptor))

    def rename(self, source: Path, target: Path) -> None:
        self._do("rename", lambda: super(CountingFileSystem, self).rename(source, target))

    def remove(self, path: Path) -> None:
        self._do("remove", lambda: super(CountingFileSystem, self).remove(path))

    def make_folder(self, folder: Path) -> None:
        self._do("make_folder", lambda: super(CountingFileSystem, self).make_folder(folder))

    def sync_folder(self, folder: Path) -> None:
        self._do("sync_folder", lambda: super(CountingFileSystem, self).sync_folder(folder))

    def _do(self, name: str, operation: Callable[[], T]) -> T:
        self.count += 1
        if self._at is not None:
            self._at(self.count, name)
        return operation()


class PowerCut(BaseException):
    """Nothing that is done after it reaches the disk."""


class FaultyFileSystem(CountingFileSystem):
    """Writes less than it is asked to, with a delay, fails at one operation, and loses its power before another."""

    def __init__(
        self,
        at: Callable[[int, str], None] | None = None,
        *,
        fails_at: int = 0,
        cuts_at: int = 0,
        delay: float = 0.0,
    ) -> None:
        super().__init__(at)
        self._fails_at = fails_at
        self._cuts_at = cuts_at
        self._delay = delay
        self._dead = False
        self._open: dict[int, Path] = {}
        self._unsynced: set[Path] = set()
        self._renamed: tuple[Path, Path, bytes | None] | None = None

    def lose_power(self) -> None:
        """Leave on the disk what was not synchronised in the worst shape that is allowed."""
        self._dead = True
        if self._renamed is not None:
            source, target, before = self._renamed
            os.replace(target, source)
            if before is not None:
                target.write_bytes(before)
        for path in [path for path in self._unsynced if path.exists()]:
            data = path.read_bytes()
            path.write_bytes(data[: len(data) // 2] + bytes(len(data) // 4))

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self._open[descriptor] = path
        self._unsynced.add(path)
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        return super().write(descriptor, data[: 1 + len(data) // 2])

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self._unsynced.discard(self._open[descriptor])

    def rename(self, source: Path, target: Path) -> None:
        before = target.read_bytes() if target.exists() else None
        super().rename(source, target)
        if source in self._unsynced:
            self._unsynced.add(target)
        self._renamed = source, target, before

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        self._renamed = None

    def _do(self, name: str, operation: Callable[[], T]) -> T:
        time.sleep(self._delay)

        def guarded() -> T:
            if self.count == self._cuts_at:
                self.lose_power()
                raise PowerCut
            if self._dead or self.count == self._fails_at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return operation()

        return super()._do(name, guarded)
