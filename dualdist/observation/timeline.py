"""The timeline of a world: when each collective was agreed on and when it ran, as a Chrome trace.

Names are those of Horovod (horovod/common/timeline.cc). Rank 0 writes what it sees. Each tensor name is a track.
NEGOTIATE_ALLREDUCE lasts until all ranks have called the allreduce, with a mark at the time when each rank called it.
ALLREDUCE is the collective itself; inside it, GLOO_ALLREDUCE names the transport. The same holds for other collectives.

The trace differs from Horovod's where this package works differently: a grouped call is one track; a reduction that is
small enough to be sent with the agreement spends its time in NEGOTIATE_ALLREDUCE; gradients have one track per bucket;
and each agreement is one cycle. A mark has the time of its own rank's clock; if that lies outside the span, the mark is
moved to the nearer end. On a GPU a span ends when the collective is queued, not when it has finished.

While torch's profiler runs, it gets ranges on each rank, without a file; that of a bucket is the wait for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.profiler import record_function

from ..core.agreement.call import Call, Data
from ..core.backends.base import Backend, Work
from ..errors import ConfigurationError, logger

Shown = Mapping[str, str] | None
"""What a trace shows beside the name of a span."""

# A Chrome trace on disk, which is valid JSON after every write.
#
# Each write overwrites the closing bracket of the list and appends another, for a process that is killed.


class TraceFile:
    """The file of a Chrome trace. A trace "process" (pid) is a named track, a "thread" (tid) one row of that track."""

    def __init__(self, path: str) -> None:
        """Create the file at `path`, or overwrite it. Raises OSError when it cannot be written."""
        self.path = path
        self._lock = threading.RLock()
        self._tracks: dict[str, int] = {}
        self._depths: dict[tuple[int, int], int] = {}
        """(pid, tid) -> number of open spans."""
        self._start, self.epoch = time.monotonic_ns(), time.time_ns()
        """When the trace begins, in nanoseconds; `epoch` since that of the clocks of all ranks."""
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._end = os.pwrite(self._file, b"[", 0)
        self._write(*_metadata(0, start_time_since_epoch_in_micros=self.epoch // 1000), separator="\n")

    def now(self) -> int:
        """Return the time in microseconds since the start of the trace."""
        return (time.monotonic_ns() - self._start) // 1000

    def track(self, name: str, members: Iterable[str] = ()) -> int:
        """Return the number (pid) of the track called `name`; `members` are shown beside the name."""
        with self._lock:
            if name not in self._tracks:
                pid = self._tracks[name] = len(self._tracks) + 1
                label = _event("M", pid, name="process_labels", args={"labels": ", ".join(members)})
                self._write(*_metadata(pid, name=name), *([label] if label["args"]["labels"] else []))
            return self._tracks[name]

    def begin(self, pid: int, tid: int, *names: str, args: Shown = None) -> int:
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

    def end(self, pid: int, tid: int, count: int = 1, args: Shown = None) -> None:
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


_ACTIVITIES = {"BROADCAST": "BCAST", "ADASUM": "ADASUM_ALLREDUCE"}
"""Event -> its name after the transport's, as in GLOO_BCAST, where Horovod writes another name there."""


@dataclass
class Timeline:
    """Records the collectives of one world while a file is open, which only rank 0 ever opens, or a profiler runs."""

    backend: Backend
    file: TraceFile | None = None
    """The open file."""
    mark_cycles: bool = False
    recorders: dict[str, ChannelRecorder] = field(default_factory=dict)
    """Those of the channels, in the order of their rows (tid) in each track."""
    works: dict[str, _RecordedWork] = field(default_factory=dict)
    """The allreduces that may not have ended, by their names."""

    def open(self, path: str, mark_cycles: bool) -> None:
        """On rank 0, write to `path` from now on. If `path` is open already, continue it; close any other open file.

        Raises ConfigurationError when the file cannot be written.
        """
        self.mark_cycles = mark_cycles
        if self.backend.rank != 0 or (self.file is not None and self.file.path == path):
            return
        self.close()
        try:
            self.file = TraceFile(path)
        except OSError as error:
            raise ConfigurationError(
                f"The timeline must be a file that can be written, but is {path!r} instead: {error.strerror}. "
                "Choose another one in HOROVOD_TIMELINE or start_timeline()."
            ) from error

    def close(self) -> None:
        """Close the file, if one is open."""
        file, self.file = self.file, None
        self.works.clear()
        if file is not None:
            file.close()

    def of_channel(self, name: str, ranks: Sequence[int]) -> ChannelRecorder:
        """Return the recorder of the calls of a channel, whose members are `ranks`."""
        if name not in self.recorders:
            self.recorders[name] = ChannelRecorder(self, len(self.recorders), ranks)
        return self.recorders[name]

    def activity(self, event: str, device: str) -> str:
        """Return the name of the transport that carries an event."""
        return f"{self.backend.transport_of(device).upper()}_{_ACTIVITIES.get(event, event)}"


class ChannelRecorder:
    """Records the calls of one channel, as spans in its row of each track, by the events of an Observer.

    One thread at a time runs them.
    """

    def __init__(self, timeline: Timeline, row: int, ranks: Sequence[int]) -> None:
        self._timeline, self._row, self._ranks = timeline, row, ranks
        self._call: Call | None = None
        """The last call on which the members began to agree."""
        self._span: contextlib.ExitStack | None = None
        """Ends what has begun."""
        self._in_file: tuple[TraceFile, int, int] | None = None
        """Its file, track and beginning there."""

    def agreeing(self, call: Call) -> bool:
        self._call, file = call, self._timeline.file
        if file is not None and self._timeline.mark_cycles:
            file.mark_everywhere("CYCLE_START")
        self._begin(call, f"NEGOTIATE_{_event_name(call)}", args={"where": call.where})
        return file is not None

    def agreed(self, call: Call | None, arrivals: Sequence[int]) -> None:
        if call is None:
            return self.ended()
        if call is not self._call:  # it was not the oldest one of this rank
            self.ended()
            self.agreeing(call)
        if self._in_file is not None:
            file, pid, start = self._in_file
            end = file.now()
            within = (min(max((arrival - file.epoch) // 1000, start), end) for arrival in arrivals)
            file.mark(pid, self._row, dict(zip(map(str, self._ranks), within, strict=False)))
        self.ended()
        if call.kind.data is Data.AFTER:
            event, device = _event_name(call), dict(call.arguments).get("device", "cpu")
            self._begin(call, event, self._timeline.activity(event, device), end_args=_shown(call))

    def ended(self) -> None:
        if self._span is not None:
            self._span.close()
            self._span = self._in_file = None

    def sent(self, work: Work, name: str, params: Iterable[str], bucket: torch.Tensor) -> Work:
        """Return `work`, an allreduce that has just started, wrapped to record its time.

        The span ends when the program notices that the work is done: in a wait for it, or when the next work starts.
        """
        timeline, file = self._timeline, self._timeline.file
        if file is None:
            return _RecordedWork(work, name)
        if (abandoned := timeline.works.pop(name, None)) is not None:
            abandoned.end()
        timeline.works = {other: record for other, record in timeline.works.items() if not record.done()}
        pid = file.track(f"allreduce.{name}", params)
        file.begin(pid, 0, "ALLREDUCE", timeline.activity("ALLREDUCE", bucket.device.type))
        record = timeline.works[name] = _RecordedWork(work, name, lambda: file.end(pid, 0, 2))
        return record

    def _begin(self, call: Call, *events: str, args: Shown = None, end_args: Shown = None) -> None:
        """Begin spans inside each other, and show the outermost to the profiler."""
        track, file, self._span = f"{call.kind}.{call.name or 'noname'}", self._timeline.file, contextlib.ExitStack()
        if call.kind.data is Data.BEFORE:
            track = f"allreduce.gradients.{dict(call.arguments)['grad_sync']}"
        self._span.enter_context(record_function(f"dualdist::{events[0]} {track}"))
        if file is not None:
            pid = file.track(track)
            self._in_file = file, pid, file.begin(pid, self._row, *events, args=args)
            self._span.callback(file.end, pid, self._row, len(events), end_args)


class _RecordedWork(Work):
    """A Work that calls `on_end` once, when it is done, and shows the profiler when it is waited for."""

    def __init__(self, work: Work, name: str, on_end: Callable[[], None] = lambda: None) -> None:
        self._work, self._name = work, f"dualdist::ALLREDUCE allreduce.{name}"
        self._on_end: Callable[[], None] | None = on_end

    def wait(self) -> None:
        try:
            with record_function(self._name):
                self._work.wait()
        finally:
            self.end()

    def done(self) -> bool:
        if self._on_end is not None and self._work.done():
            self.end()
        return self._on_end is None

    def wait_for(self, seconds: float) -> None:
        with record_function(self._name):
            self._work.wait_for(seconds)
        self.done()

    def end(self) -> None:
        """Call `on_end`, unless it was called before."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()


def _event_name(call: Call) -> str:
    if dict(call.arguments).get("op") == "Adasum":
        return "ADASUM"
    return call.kind.event


def _shown(call: Call) -> dict[str, str]:
    """Return dtype and shape as Horovod writes them, `*` for a length that may differ between the ranks."""
    given = dict(call.arguments)
    dtypes = given.get("dtypes") or [given[key] for key in ("dtype",) if key in given]
    shapes = given.get("shapes") or [given[key] for key in ("shape",) if key in given]
    ragged = given.get("trailing_shapes") or [given[key] for key in ("trailing_shape",) if key in given]
    texts = [str(list(shape)) for shape in shapes]
    texts += [f"[{', '.join(['*', *map(str, shape)])}]" for shape in ragged]
    shown = {"dtype": ", ".join(dtypes), "shape": ", ".join(texts)}
    return {key: text for key, text in shown.items() if text}
