"""What a world's collectives look like in time: a Chrome trace with Horovod's event names.

As in Horovod (horovod/common/timeline.cc), rank 0 writes what it sees, a trace "process" stands for a tensor's name,
NEGOTIATE_* is the time until all ranks have come, with a mark where each of them came, and ALLREDUCE and its like are
the time of the collective, inside which GLOO_ALLREDUCE and its like name the transport. Where this package works
otherwise, so does the trace: a grouped call is one name, reductions so small that they travel with the agreement spend
their time in NEGOTIATE_*, gradients have a name per bucket, and every agreement counts as a cycle. Other ranks' clocks
decide where their marks are, within the span. On a GPU a span ends when the collective is queued, not when it is done.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..backends.base import Backend, Work
from ..errors import ConfigurationError
from . import kinds
from .call import Call
from .kinds import Data

__all__ = ("Timeline", "TraceFile")

logger = logging.getLogger("dualdist")

_ACTIVITIES = {"BROADCAST": "BCAST", "ADASUM": "ADASUM_ALLREDUCE"}
"""Event -> what the transport does; others are the same."""

Arrivals = Callable[[Sequence[int]], None]
"""Takes when each member came, in nanoseconds since the epoch by its own clock."""

_IGNORED: AbstractContextManager[Arrivals] = contextlib.nullcontext(lambda arrivals: None)
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class TraceFile:
    """A Chrome trace on disk, valid JSON after every write: each one goes over the closing bracket and brings its own.

    So a process that is killed leaves a file that can be read. Raises OSError when `path` cannot be written.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._tracks: dict[str, int] = {}
        self._depths: dict[tuple[int, int], int] = {}
        self._start, self._epoch = time.monotonic_ns(), time.time_ns()
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._end = os.pwrite(self._file, b"[", 0)
        self._write(*_metadata(0, start_time_since_epoch_in_micros=self._epoch // 1000), separator="\n")

    def now(self) -> int:
        """Return the time in microseconds since the start of the trace."""
        return (time.monotonic_ns() - self._start) // 1000

    def since_start(self, epoch_ns: int) -> int:
        """Return nanoseconds since the epoch as microseconds since the start of the trace."""
        return (epoch_ns - self._epoch) // 1000

    def track(self, name: str, members: Iterable[str] = ()) -> int:
        """Return the number of the trace process called `name`; `members` are shown beside it."""
        with self._lock:
            if name not in self._tracks:
                pid = self._tracks[name] = len(self._tracks) + 1
                label = _event("M", pid, name="process_labels", args={"labels": ", ".join(members)})
                self._write(*_metadata(pid, name=name), *([label] if label["args"]["labels"] else []))
            return self._tracks[name]

    def begin(self, pid: int, tid: int, *names: str, args: Mapping[str, str] | None = None) -> int:
        """Open nested spans called `names`, the outermost first; `args` belong to that one. Return the time."""
        now = self.now()
        with self._lock:
            self._depths[pid, tid] = self._depths.get((pid, tid), 0) + len(names)
            self._write(
                *(
                    _event(
                        "B", pid, tid=tid, name=name, ts=now, **({"args": args} if args and not place else {})
                    )
                    for place, name in enumerate(names)
                )
            )
        return now

    def mark(self, pid: int, tid: int, names: Mapping[str, int]) -> None:
        """Put a mark for each of `names` at its time in microseconds, in the order of time."""
        ordered = sorted(names.items(), key=lambda item: item[1])
        self._write(*(_event("X", pid, tid=tid, name=name, ts=ts, dur=0) for name, ts in ordered))

    def mark_everywhere(self, name: str) -> None:
        """Put a mark across all tracks, now."""
        self._write({"ph": "i", "name": name, "ts": self.now(), "pid": 0, "tid": 0, "s": "g"})

    def end(self, pid: int, tid: int, count: int = 1, args: Mapping[str, str] | None = None) -> None:
        """Close the innermost `count` spans; `args` belong to the outermost of them."""
        now = self.now()
        with self._lock:
            self._depths[pid, tid] -= count
            self._write(
                *(
                    _event("E", pid, tid=tid, ts=now, **({"args": args} if args and left == 0 else {}))
                    for left in reversed(range(count))
                )
            )

    def close(self) -> None:
        """Close the spans that are open, and the file. What comes later is ignored."""
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


class Timeline:
    """The trace of one world. Does nothing while no file is open, which is always so on ranks other than 0."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._file: TraceFile | None = None
        self._mark_cycles = False
        self._lines: dict[str, int] = {}
        self._flights: dict[str, _Flight] = {}

    def open(self, path: str, mark_cycles: bool) -> None:
        """Write to `path` from now on, on rank 0; the file that was open is closed. The same path is gone on with.

        Raises ConfigurationError when the file cannot be written.
        """
        self._mark_cycles = mark_cycles
        if self._backend.rank != 0 or (self._file is not None and self._file.path == path):
            return
        self.close()
        try:
            self._file = TraceFile(path)
        except OSError as error:
            raise ConfigurationError(
                f"The timeline must be a file that can be written, but is {path!r} instead: {error.strerror}. "
                "Choose another one in HOROVOD_TIMELINE or start_timeline()."
            ) from error

    def close(self) -> None:
        """Close the file, if one is open."""
        file, self._file = self._file, None
        self._flights.clear()
        if file is not None:
            file.close()

    def negotiation(self, line: str, ranks: Sequence[int], call: Call) -> AbstractContextManager[Arrivals]:
        """Record the body as the agreement of `ranks` on `call`; it is given what to tell the arrivals."""
        return _IGNORED if self._file is None else self._negotiation(self._file, line, ranks, call)

    @contextlib.contextmanager
    def _negotiation(
        self, file: TraceFile, line: str, ranks: Sequence[int], call: Call
    ) -> Iterator[Arrivals]:
        if self._mark_cycles:
            file.mark_everywhere("CYCLE_START")
        pid, tid = file.track(_track_name(call)), self._tid(line)
        start = file.begin(pid, tid, f"NEGOTIATE_{_event_name(call)}", args={"where": call.where})

        def tell(arrivals: Sequence[int]) -> None:
            end = file.now()
            within = (min(max(file.since_start(came), start), end) for came in arrivals)
            file.mark(pid, tid, {str(rank): came for rank, came in zip(ranks, within, strict=True)})

        try:
            yield tell
        finally:
            file.end(pid, tid)

    def operation(self, line: str, call: Call) -> AbstractContextManager[None]:
        """Record the body as the collective `call` itself."""
        if self._file is None or call.kind.data is not Data.AFTER:
            return _NOTHING
        return self._operation(self._file, line, call)

    @contextlib.contextmanager
    def _operation(self, file: TraceFile, line: str, call: Call) -> Iterator[None]:
        pid, tid, event = file.track(_track_name(call)), self._tid(line), _event_name(call)
        device = dict(call.arguments).get("device", "cpu")
        file.begin(pid, tid, event, self._activity(event, device))
        try:
            yield
        finally:
            file.end(pid, tid, 2, args=_shown(call))

    def flight(self, work: Work, name: str, members: Iterable[str], device: str) -> Work:
        """Return `work`, an allreduce of `members` that has just been started, recorded until it is done.

        Whether it is done is seen when the next one starts, and when it is waited for.
        """
        file = self._file
        if file is None:
            return work
        given_up = self._flights.pop(name, None)
        if given_up is not None:
            given_up.land()
        self._flights = {other: flight for other, flight in self._flights.items() if not flight.done()}
        pid = file.track(f"allreduce.{name}", members)
        file.begin(pid, 0, "ALLREDUCE", self._activity("ALLREDUCE", device))
        flight = _Flight(work, lambda: file.end(pid, 0, 2))
        self._flights[name] = flight
        return flight

    def _tid(self, line: str) -> int:
        return self._lines.setdefault(line, len(self._lines))

    def _activity(self, event: str, device: str) -> str:
        transport = self._backend.transport
        if transport == "nccl" and device == "cpu":
            transport = "mpi" if self._backend.facts().get("mpi_enabled") else "gloo"
        return f"{transport.upper()}_{_ACTIVITIES.get(event, event)}"


class _Flight(Work):
    """A Work that tells when it is done."""

    def __init__(self, work: Work, landed: Callable[[], None]) -> None:
        self._work = work
        self._landed: Callable[[], None] | None = landed

    def wait(self) -> None:
        try:
            self._work.wait()
        finally:
            self.land()

    def done(self) -> bool:
        if self._landed is not None and self._work.done():
            self.land()
        return self._landed is None

    def wait_for(self, seconds: float) -> None:
        self._work.wait_for(seconds)
        self.done()

    def land(self) -> None:
        """Tell that it is done, once."""
        landed, self._landed = self._landed, None
        if landed is not None:
            landed()


def _event_name(call: Call) -> str:
    if dict(call.arguments).get("op") == "Adasum":
        return "ADASUM"
    return call.kind.event


def _track_name(call: Call) -> str:
    if call.kind == kinds.GRADIENTS:
        return f"allreduce.gradients.{dict(call.arguments)['grad_sync']}"
    return f"{call.kind}.{call.name or 'noname'}"


def _shown(call: Call) -> dict[str, str]:
    """Return dtype and shape as Horovod writes them, those of a group behind one another; * for ragged rows."""
    given = dict(call.arguments)
    dtypes = given.get("dtypes") or [given[key] for key in ("dtype",) if key in given]
    shapes = given.get("shapes") or [given[key] for key in ("shape",) if key in given]
    ragged = given.get("trailing_shapes") or [given[key] for key in ("trailing_shape",) if key in given]
    texts = [str(list(shape)) for shape in shapes]
    texts += [f"[{', '.join(['*', *map(str, shape)])}]" for shape in ragged]
    shown = {"dtype": ", ".join(dtypes), "shape": ", ".join(texts)}
    return {key: text for key, text in shown.items() if text}
