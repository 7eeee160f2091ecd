"""A stand-in for `os` that tears, delays and fails what a checkpoint asks of it, at chosen operations."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from dualdist.checkpoint import catalog, format

T = TypeVar("T")


class CountingFileSystem:
    """Calls `at(number, name)` before every operation, counted from 1; it may raise, or end the process.

    Operations are what changes a folder, or a file that was opened for writing. All else is passed on to `os`.
    """

    def __init__(self, at: Callable[[int, str], None] | None = None) -> None:
        self.count = 0
        self.at = at
        self._written: set[int] = set()
        """The descriptors of the files that are being written."""

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Let checkpoints use it in the block."""
        with patch.object(format, "os", self), patch.object(catalog, "os", self):
            yield

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        if not flags & os.O_CREAT:
            return os.open(path, flags, mode)
        return self._do("create", lambda: self._create(Path(path), flags, mode))

    def _create(self, path: Path, flags: int, mode: int) -> int:
        descriptor = os.open(path, flags, mode)
        self._written.add(descriptor)
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        return self._do("write", lambda: os.write(descriptor, data))

    def fsync(self, descriptor: int) -> None:
        is_file = descriptor in self._written
        self._do("sync" if is_file else "sync_folder", lambda: self._sync(descriptor))

    def _sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        if descriptor not in self._written:
            return os.close(descriptor)
        self._written.remove(descriptor)
        return self._do("close", lambda: os.close(descriptor))

    def replace(self, source: Path, target: Path) -> None:
        self._do("rename", lambda: self._rename(source, target))

    def _rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        self._do("remove", lambda: os.unlink(path))

    def makedirs(self, folder: Path, exist_ok: bool) -> None:
        self._do("make_folder", lambda: os.makedirs(folder, exist_ok=exist_ok))

    def _do(self, name: str, operation: Callable[[], T]) -> T:
        self.count += 1
        if self.at is not None:
            self.at(self.count, name)
        return operation()


class PowerCut(BaseException):
    """Nothing that is done after it reaches the disk."""


class FaultyFileSystem(CountingFileSystem):
    """Writes less than it is asked to, with a delay, fails at one operation, and loses its power before another."""

    def __init__(
        self, at: Callable[[int, str], None] | None = None, *, fails_at: int = 0, cuts_at: int = 0, delay: float = 0.0
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

    def write(self, descriptor: int, data: memoryview) -> int:
        return super().write(descriptor, data[: 1 + len(data) // 2])

    def _create(self, path: Path, flags: int, mode: int) -> int:
        descriptor = super()._create(path, flags, mode)
        self._open[descriptor] = path
        self._unsynced.add(path)
        return descriptor

    def _sync(self, descriptor: int) -> None:
        super()._sync(descriptor)
        if descriptor in self._written:
            self._unsynced.discard(self._open[descriptor])
        else:
            self._renamed = None

    def _rename(self, source: Path, target: Path) -> None:
        before = target.read_bytes() if target.exists() else None
        super()._rename(source, target)
        if source in self._unsynced:
            self._unsynced.add(target)
        self._renamed = source, target, before

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
