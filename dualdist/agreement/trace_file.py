"""A Chrome trace on disk, which is valid JSON after every write.

Each write overwrites the closing bracket of the JSON list and appends a new one. So the file of a process that is
killed can still be read.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ("TraceFile",)

logger = logging.getLogger("dualdist")


class TraceFile:
    """The file of a Chrome trace. A trace "process" (pid) is a named track, a "thread" (tid) one row of that track."""

    def __init__(self, path: str) -> None:
        """Create the file at `path`, or overwrite it. Raises OSError when it cannot be written."""
        self.path = path
        self._lock = threading.RLock()
        self._tracks: dict[str, int] = {}
        self._depths: dict[tuple[int, int], int] = {}
        """(pid, tid) -> number of open spans."""
        self._start, self._epoch = time.monotonic_ns(), time.time_ns()
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._end = os.pwrite(self._file, b"[", 0)
        self._write(*_metadata(0, start_time_since_epoch_in_micros=self._epoch // 1000), separator="\n")

    def now(self) -> int:
        """Return the time in microseconds since the start of the trace."""
        return (time.monotonic_ns() - self._start) // 1000

    def since_start(self, epoch_ns: int) -> int:
        """Convert nanoseconds since the epoch to microseconds since the start of the trace."""
        return (epoch_ns - self._epoch) // 1000

    def track(self, name: str, members: Iterable[str] = ()) -> int:
        """Return the number (pid) of the track called `name`; `members` are shown beside the name."""
        with self._lock:
            if name not in self._tracks:
                pid = self._tracks[name] = len(self._tracks) + 1
                label = _event("M", pid, name="process_labels", args={"labels": ", ".join(members)})
                self._write(*_metadata(pid, name=name), *([label] if label["args"]["labels"] else []))
            return self._tracks[name]

    def begin(self, pid: int, tid: int, *names: str, args: Mapping[str, str] | None = None) -> int:
        """Open nested spans called `names`, the outermost first; the outermost gets `args`. Return `now()`."""
        now = self.now()
        with self._lock:
            self._depths[pid, tid] = self._depths.get((pid, tid), 0) + len(names)
            events = [_event("B", pid, tid=tid, name=name, ts=now) for name in names]
            if args:
                events[0]["args"] = args
            self._write(*events)
        return now

    def mark(self, pid: int, tid: int, names: Mapping[str, int]) -> None:
        """Write a mark for each of `names` (name -> time in microseconds), in the order of time."""
        ordered = sorted(names.items(), key=lambda item: item[1])
        self._write(*(_event("X", pid, tid=tid, name=name, ts=ts, dur=0) for name, ts in ordered))

    def mark_everywhere(self, name: str) -> None:
        """Write a mark across all tracks, at the current time."""
        self._write({"ph": "i", "name": name, "ts": self.now(), "pid": 0, "tid": 0, "s": "g"})

    def end(self, pid: int, tid: int, count: int = 1, args: Mapping[str, str] | None = None) -> None:
        """Close the innermost `count` spans; the outermost of them gets `args`."""
        now = self.now()
        with self._lock:
            self._depths[pid, tid] -= count
            events = [_event("E", pid, tid=tid, ts=now) for _ in range(count)]
            if args:
                events[-1]["args"] = args
            self._write(*events)

    def close(self) -> None:
        """Close the open spans and the file. Later writes are ignored."""
        with self._lock:
            for (pid, tid), depth in list(self._depths.items()):
                if depth:
                    self.end(pid, tid, depth)
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def _write(self, *events: Mapping[str, Any], separator: str = ",\n") -> None:
        text = separator + ",\n".join(map(json.dumps, events))
        with self._lock:
            if self._file is None or not events:
                return
            try:
                os.pwrite(self._file, f"{text}\n]\n".encode(), self._end)
            except OSError as error:
                logger.warning("The timeline %s ends here: %s.", self.path, error)
                os.close(self._file)
                self._file = None
            self._end += len(text.encode())


def _event(phase: str, pid: int, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": pid, **fields}


def _metadata(pid: int, **args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return (
        _event("M", pid, name="process_name", args=args),
        _event("M", pid, name="process_sort_index", args={"sort_index": pid}),
    )
