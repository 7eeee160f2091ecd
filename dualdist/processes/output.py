"""Writes the output of all processes to the launcher's own output, in whole lines with the rank before each.

The form of a line is that of horovodrun and mpirun, `[1,0]<stdout>:text`. A carriage return also ends a line: on a
terminal, the next one replaces it, so that progress bars move, and elsewhere each of their updates is a line. A write
never blocks, even while nobody reads; see Sink.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import IO

from ..core.process import in_thread
from ..errors import ConfigurationError
from .agent import write_all

# Writes to one open file in a thread of its own, because a write blocks while nobody reads from a pipe or terminal.
#
# The launcher must honour signals, and notice the ends of processes, whatever happens to its output. Non-blocking
# writes cannot be used: O_NONBLOCK belongs to the open file, which the launcher shares with the shell.


class Sink:
    """A queue of bytes for the file `descriptor`. `put` never waits."""

    def __init__(self, descriptor: int, notify: Callable[[], None]) -> None:
        """notify: called in the thread after each write, and when writing has failed."""
        self.error: OSError | None = None
        """Why writing has failed. Nothing is written after that."""
        self.redraws = os.isatty(descriptor) and os.environ.get("TERM") != "dumb"
        """Whether a line that ends with a carriage return is replaced by the next."""
        self._descriptor = descriptor
        self._notify = notify
        self._pending: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._ended: Future[None] | None = None
        self._given = self._written = 0

    @property
    def size(self) -> int:
        return self._given - self._written

    def put(self, data: bytes) -> None:
        """Write `data`, which is not empty, after all that was put before. The first call starts the thread."""
        if self._ended is None:
            self._ended = in_thread(self._work, f"dualdist-output-{self._descriptor}")
        self._given += len(data)
        self._pending.put(data)

    def close(self, seconds: float) -> bool:
        """End the thread when it has written everything. Return whether it ended within `seconds`."""
        self._pending.put(b"")
        return self._ended is None or bool(wait([self._ended], seconds).done)

    def _work(self) -> None:
        try:
            for data in iter(self._pending.get, b""):
                write_all(self._descriptor, data)
                self._written += len(data)
                self._notify()
        except OSError as error:
            self.error = error
            self._notify()


LONGEST_LINE = 1 << 20
"""Bytes. A longer line is written in pieces of this length."""
CUT = b" [the line continues]\n"
"""The end of each piece but the last."""

_NAMES = {1: "stdout", 2: "stderr"}
MOST_UNWRITTEN = 4 << 20
"""How many bytes may be unwritten before the processes must wait."""
_LAST_SECONDS = 1.0
"""How long to wait for the last writes after an error."""
_LINE_END, _RETURN = re.compile(rb"[\r\n]"), re.compile(rb"\r(?!\n)")
_EMPTY_UPDATE = re.compile(rb"(?<![^\r\n]) *\r(?!\n)")
"""An update of a progress bar that shows nothing. tqdm starts each with a carriage return, and removes it by spaces."""


class _Lines:
    """One stream of one rank."""

    def __init__(self, prefix: str, sink: Sink, copy: IO[bytes] | None, timestamps: bool) -> None:
        self._prefix = prefix
        self._sink = sink
        self._copy = copy
        self._timestamps = timestamps
        self._rest = bytearray()
        """The start of a line whose end has not arrived. A last \\r may be one of \\r\\n: the next byte shows it."""

    def write(self, data: bytes) -> None:
        if self._copy is not None:
            self._copy.write(data)
            self._copy.flush()
        self._rest += data
        while len(self._rest) > LONGEST_LINE and not _LINE_END.search(self._rest, 0, LONGEST_LINE + 1):
            self._sink.put(self._context() + self._rest[:LONGEST_LINE] + CUT)
            del self._rest[:LONGEST_LINE]
        start = max(0, len(self._rest) - len(data) - 1)  # before it there is no line end
        end = max(self._rest.rfind(b"\n", start), self._rest.rfind(b"\r", start, -1)) + 1
        if end:
            self._put_lines(bytes(self._rest[:end]))
            del self._rest[:end]

    def _put_lines(self, text: bytes) -> None:
        """Write whole lines. One pass over the text for each kind of line end is 20 times as fast as one per line."""
        context = self._context()
        if b"\r" in text:
            end = b"\r" + context if self._sink.redraws else b"\n"
            text = _RETURN.sub(lambda _: end, _EMPTY_UPDATE.sub(b"", text))
        if text:
            # The last prefix is removed: that line has not begun.
            self._sink.put((context + text.replace(b"\n", b"\n" + context))[: -len(context)])

    def close(self) -> None:
        if rest := self._rest.removesuffix(b"\r"):
            self._sink.put(self._context() + rest + b"\n")
        if self._copy is not None:
            self._copy.close()

    def _context(self) -> bytes:
        erase = "\x1b[K" if self._sink.redraws else ""
        return f"{erase}{time.asctime() if self._timestamps else ''}{self._prefix}".encode()


class Output:
    """Writes the processes' output to that of this process, and also to files in `folder` if it is given.

    As with horovodrun --output-filename, the files are FOLDER/rank.N/stdout and stderr, N padded with zeros. They hold
    the bytes as they were written, without a prefix.
    """

    def __init__(self, size: int, folder: Path | None, *, timestamps: bool = False) -> None:
        self._timestamps = timestamps
        self._streams: dict[tuple[int, int], _Lines] = {}
        self._files: dict[tuple[int, int], Path] = {}
        if folder is not None:
            digits = len(str(size - 1))
            folders = enumerate(folder / f"rank.{rank:0{digits}}" for rank in range(size))
            self._files = {(rank, stream): own / name for rank, own in folders for stream, name in _NAMES.items()}
        try:
            for file in self._files.values():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(b"")
        except OSError as error:
            raise ConfigurationError(f"`--output` must be a writable folder, but is not: {error}.") from error
        self.reader = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when something was written, or when writing failed."""
        self._sinks = self._open_sinks()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.end_lines()
        seconds = 0.0 if error is None and self.unwritten() else _LAST_SECONDS
        if all([sink.close(seconds) for sink in set(self._sinks.values())]):
            os.close(self.reader)  # not otherwise: a thread that still writes uses it

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Write the `data` that `rank` wrote to its file descriptor `stream`, 1 or 2."""
        key = (rank, stream)
        if key not in self._streams:
            copy = open(self._files[key], "ab") if key in self._files else None
            prefix = f"[1,{rank}]<{_NAMES[stream]}>:"
            self._streams[key] = _Lines(prefix, self._sinks[stream], copy, self._timestamps)
        self._streams[key].write(data)

    def report(self, text: str) -> None:
        """Write a line of the launcher itself to the standard error."""
        self._sinks[2].put(f"dualdist run: {text}\n".encode(errors="surrogateescape"))

    def unwritten(self) -> int:
        """Return how many bytes are not written yet."""
        return sum(sink.size for sink in set(self._sinks.values()))

    def empty_reader(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.reader)
        return True

    def check(self) -> None:
        """Raise OSError when the output could not be written."""
        for stream, sink in self._sinks.items():
            if sink.error is not None:
                raise OSError(sink.error.errno, sink.error.strerror, _NAMES[stream])

    def close_rank(self, rank: int) -> None:
        """Write the rest of an unfinished last line."""
        for key in sorted(key for key in self._streams if key[0] == rank):
            self._streams.pop(key).close()

    def end_lines(self) -> None:
        for rank, _ in sorted(self._streams):
            self.close_rank(rank)

    def _open_sinks(self) -> dict[int, Sink]:
        """Return where each stream is written. If both are the same file, one sink keeps their order."""
        sinks: dict[tuple[int, int], Sink] = {}
        found = {}
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            descriptor = number
            # A notebook shows what is written to 1 and 2. The file of its stream, if any, is its server's terminal.
            if isinstance(stream, io.TextIOWrapper):
                with contextlib.suppress(OSError, ValueError):
                    descriptor = stream.fileno()
            status = os.fstat(descriptor)
            file = (status.st_dev, status.st_ino)
            if file not in sinks:
                sinks[file] = Sink(descriptor, self._notify)
            found[number] = sinks[file]
        return found

    def _notify(self) -> None:
        os.eventfd_write(self.reader, 1)
