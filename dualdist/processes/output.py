"""Writes the output of all processes to the launcher's own output, in whole lines with the rank before each.

The form of a line is that of horovodrun and mpirun, `[1,0]<stdout>:text`. As in horovodrun, a carriage return also ends
a line, so that progress bars move.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO

from ..errors import ConfigurationError

__all__ = ("Output",)

_NAMES = {1: "stdout", 2: "stderr"}


class _Lines:
    """One stream of one rank."""

    def __init__(self, prefix: str, target: IO[bytes], copy: IO[bytes] | None, timestamps: bool) -> None:
        self._prefix = prefix
        self._target = target
        self._copy = copy
        self._timestamps = timestamps
        self._rest: list[bytes] = []
        self._after_return = False

    def write(self, data: bytes) -> None:
        if self._copy is not None:
            self._copy.write(data)
            self._copy.flush()
        # A \r\n that was split between two writes.
        halved, self._after_return = self._after_return and data.startswith(b"\n"), data.endswith(b"\r")
        if halved:
            self._target.write(b"\n")
            data = data[1:]
        if b"\n" not in data and b"\r" not in data:
            # Part of a long line. Parts are joined once, at its end.
            self._rest.append(data)
        else:
            self._split(b"".join([*self._rest, data]))
        self._target.flush()

    def _split(self, text: bytes) -> None:
        lines = text.splitlines(keepends=True)  # bytes are split only at \n, \r and \r\n
        self._rest = [] if lines[-1].endswith((b"\n", b"\r")) else [lines.pop()]
        for line in lines:
            self._target.write(self._context() + line)

    def close(self) -> None:
        text = b"".join(self._rest)
        if text:
            self._target.write(self._context() + text + b"\n")
            self._target.flush()
        self._rest = []
        if self._copy is not None:
            self._copy.close()

    def _context(self) -> bytes:
        return f"{time.asctime() if self._timestamps else ''}{self._prefix}".encode()


class Output:
    """Writes the processes' output to that of this process, and also to files in `folder` if it is given.

    As with horovodrun --output-filename, the files are FOLDER/rank.N/stdout and stderr, N padded with zeros. They hold
    the bytes as they were written, without a prefix.
    """

    def __init__(self, size: int, folder: Path | None, *, timestamps: bool = False) -> None:
        self._size = size
        self._folder = folder
        self._timestamps = timestamps
        self._streams: dict[tuple[int, int], _Lines] = {}
        if folder is not None:
            try:
                self._make_files(folder)
            except OSError as error:
                raise ConfigurationError(
                    f"`--output` must be a writable folder, but is not: {error}."
                ) from error

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Write the `data` that `rank` wrote to its file descriptor `stream`, 1 or 2."""
        key = (rank, stream)
        if key not in self._streams:
            self._streams[key] = self._open(rank, stream)
        self._streams[key].write(data)

    def close_rank(self, rank: int) -> None:
        """Write the rest of an unfinished last line."""
        for stream in _NAMES:
            if (rank, stream) in self._streams:
                self._streams.pop((rank, stream)).close()

    def close(self) -> None:
        """Close every rank."""
        for rank in range(self._size):
            self.close_rank(rank)

    def _open(self, rank: int, stream: int) -> _Lines:
        target = (sys.stdout if stream == 1 else sys.stderr).buffer
        copy = None
        if self._folder is not None:
            copy = open(self._rank_folder(self._folder, rank) / _NAMES[stream], "ab")
        return _Lines(f"[1,{rank}]<{_NAMES[stream]}>:", target, copy, self._timestamps)

    def _make_files(self, folder: Path) -> None:
        for rank in range(self._size):
            self._rank_folder(folder, rank).mkdir(parents=True, exist_ok=True)
            for name in _NAMES.values():
                (self._rank_folder(folder, rank) / name).write_bytes(b"")

    def _rank_folder(self, folder: Path, rank: int) -> Path:
        return folder / f"rank.{str(rank).zfill(len(str(self._size - 1)))}"
