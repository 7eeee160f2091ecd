"""From what a process writes to whole lines, each with the rank before it, on the launcher's own output.

The form of a line is that of horovodrun and mpirun, `[1,0]<stdout>:text`. A carriage return ends a line as well, as
in horovodrun, so that progress bars move.
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
        halved, self._after_return = self._after_return and data.startswith(b"\n"), data.endswith(b"\r")
        if halved:  # the other half of \r\n
            self._target.write(b"\n")
            data = data[1:]
        if b"\n" not in data and b"\r" not in data:  # a long line: join its parts once
            self._rest.append(data)
        else:
            self._split(b"".join([*self._rest, data]))
        self._target.flush()

    def _split(self, text: bytes) -> None:
        lines = text.splitlines(keepends=True)  # of bytes: at \n, \r and \r\n alone
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
    """Where the processes' output goes: to this process's own, and to files in `folder` if one is given.

    As with horovodrun --output-filename, the files are FOLDER/rank.N/stdout and stderr, N padded with zeros, and
    come beside the terminal; they hold the bytes as they were written, without a prefix.
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
                    f"`--output` must be a folder that can be written, but: {error}."
                ) from error

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Take what `rank` wrote to its file descriptor `stream`, 1 or 2."""
        key = (rank, stream)
        if key not in self._streams:
            self._streams[key] = self._open(rank, stream)
        self._streams[key].write(data)

    def close_rank(self, rank: int) -> None:
        """Write what is left of a last line without an end."""
        for stream in _NAMES:
            if (rank, stream) in self._streams:
                self._streams.pop((rank, stream)).close()

    def close(self) -> None:
        """Write what is left of every rank."""
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
