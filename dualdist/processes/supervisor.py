"""The processes of a job, host by host: starting them, hearing from them, and ending them everywhere.

Each host has one shim (agent.py), which this module starts here or over ssh. What travels to it, environment and
secret included, goes through its standard input: `ps` shows none of it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from . import agent
from .agent import ENDED, HEADER, STARTED, STDERR, STDOUT

__all__ = (
    "BOOTSTRAP",
    "GRACE_SECONDS",
    "LOST",
    "Crew",
    "Event",
    "Process",
    "Shim",
    "Spec",
    "ending",
    "portable",
)

LOST = max(STARTED, STDOUT, STDERR, ENDED) + 1

BOOTSTRAP = (
    sys.executable,
    "-E",
    "-s",
    "-S",
    "-c",
    "import sys;i=sys.stdin.buffer;exec(i.read(int(i.readline())))",
)
"""The command of a shim: its source comes through its standard input."""

GRACE_SECONDS = 4.0
"""Between the signal that asks a process to end, and SIGKILL."""
_LAST_SECONDS = 4.0
"""How long a shim may take to end after that; over a broken connection it will not."""
_BEAT_SECONDS, _SILENCE_SECONDS = 5.0, 60.0
"""How often a shim on another host hears that the launcher is alive, and how long it waits to hear it."""
_LAST_WORDS_SECONDS = 1.0
"""Between the end of ssh's output and that of ssh."""
_CHUNK = 1 << 16
_LONGEST_GREETING = 1 << 16
"""Bytes which a login shell may print before the shim's first word."""


@dataclass(frozen=True)
class Process:
    """One process: its rank, what it runs, the variables that are its own, and the open files that it inherits."""

    rank: int
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    fds: Sequence[int] = ()


@dataclass(frozen=True)
class Spec:
    """The processes of one host."""

    host: str
    command: Sequence[str]
    """What starts the shim: BOOTSTRAP, or ssh with it."""
    processes: Sequence[Process]
    env: Mapping[str, str]
    """Of all of them; the whole environment here, additions to the login's on another host."""
    local: bool = True
    output: tuple[int, int] | None = None
    """The open files where the processes write; None: they write to the launcher."""


@dataclass(frozen=True)
class Event:
    """What came from a process (kind STARTED, STDOUT, STDERR or ENDED of agent.py), or LOST from its host."""

    kind: int
    rank: int
    host: str
    data: bytes = b""
    """What it wrote, for STDOUT and STDERR."""
    fact: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """STARTED: pid, threads (OMP_NUM_THREADS unless it was set). ENDED: code (negative: a signal), time, error (why it
    could not be started). LOST: error (what happened to its host)."""


def portable(text: str) -> str:
    """Return `text` such that JSON carries it without loss, whatever its bytes are."""
    return os.fsencode(text).decode("latin-1")


def ending(code: int) -> str:
    """Return in words how a process ended. code: as of subprocess, minus the signal that ended it."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _portable(env: Mapping[str, str]) -> dict[str, str]:
    return {portable(name): portable(value) for name, value in env.items()}


class Shim:
    """The launcher's end of one host's shim."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.words = b""
        """What it, or ssh, said on its standard error."""
        self.open = True
        """Whether more may come."""
        self.greeted = False
        self._token = secrets.token_hex(16)
        self._buffer = bytearray()
        self._unended = {index: process.rank for index, process in enumerate(spec.processes)}
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        fds = {fd for process in spec.processes for fd in process.fds} | set(spec.output or ())
        self.popen = subprocess.Popen(
            spec.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=tuple(fds),
            bufsize=0,
        )
        assert self.popen.stderr is not None
        os.set_blocking(self.popen.stderr.fileno(), False)
        self._outbox.put(self._first_words())
        self._sender = threading.Thread(target=self._send, name=f"dualdist-{spec.host}", daemon=True)
        self._sender.start()

    def _first_words(self) -> bytes:
        source = Path(agent.__file__).read_bytes()
        processes = [
            {
                "argv": [portable(argument) for argument in process.argv],
                "env": _portable(process.env),
                "fds": list(process.fds),
            }
            for process in self.spec.processes
        ]
        wanted = {
            "token": self._token,
            "cwd": portable(os.getcwd()),
            "env": _portable(self.spec.env),
            "inherit": not self.spec.local,
            "parent": os.getpid() if self.spec.local else None,
            "silence": None if self.spec.local else _SILENCE_SECONDS,
            "output": self.spec.output,
            "processes": processes,
        }
        text = json.dumps(wanted).encode()
        return b"%d\n%b%d\n%b" % (len(source), source, len(text), text)

    def _send(self) -> None:
        """Write what is to be sent, and now and then that we are alive. A thread of its own: a write may block."""
        stream = self.popen.stdin
        assert stream is not None
        with contextlib.suppress(OSError), stream:
            while True:
                try:
                    data = self._outbox.get(timeout=_BEAT_SECONDS)
                except queue.Empty:
                    data = b"\n"
                if data is None:
                    return
                view = memoryview(data)
                while view:
                    view = view[stream.write(view) :]

    def end(self, number: int, grace: float) -> None:
        """Ask every process to end by signal `number`; those that are left after `grace` seconds are killed."""
        if not self.greeted:  # it does not listen yet; a shim on its way ends at the end of its input
            self.popen.kill()
        self._outbox.put(b"end %d %f\n" % (number, grace))

    def kill(self) -> None:
        """Kill every process."""
        self._outbox.put(b"kill\n")

    def close(self, patience: float) -> None:
        """Wait `patience` seconds at most until the shim has ended; then do without."""
        try:
            self.popen.wait(patience)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self._outbox.put(None)
        self._sender.join()
        for stream in (self.popen.stdout, self.popen.stderr):
            if stream is not None:
                stream.close()

    def read(self) -> Iterator[Event]:
        """Yield what has come, once there is something. At the end, what has not ended counts as lost."""
        assert self.popen.stdout is not None
        data = os.read(self.popen.stdout.fileno(), _CHUNK)
        self._buffer += data
        if not self.greeted:
            place = self._buffer.find(self._token.encode())
            if place >= 0:
                self.greeted = True
                del self._buffer[: place + len(self._token)]
            elif len(self._buffer) > _LONGEST_GREETING:
                del self._buffer[: -len(self._token)]
        if self.greeted:
            yield from self._frames()
        if not data:
            self.open = False
            for index in list(self._unended):
                yield self._event(LOST, index, {"error": self._why_lost()})

    def hear(self) -> bool:
        """Note what ssh says; return whether more may come."""
        assert self.popen.stderr is not None
        try:
            data = os.read(self.popen.stderr.fileno(), _CHUNK)
        except BlockingIOError:
            return True
        self.words = (self.words + data)[-_CHUNK:]
        return bool(data)

    def said(self) -> str:
        """Return in one line what ssh said."""
        return "; ".join(self.words.decode(errors="replace").splitlines()).strip("; ")

    def _why_lost(self) -> str:
        """Return how the host was lost."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(_LAST_WORDS_SECONDS)
        self.hear()
        said = self.said()
        happened = "the connection was lost" if self.greeted else "it could not be reached"
        return f"{happened}: {said}" if said else happened

    def _frames(self) -> Iterator[Event]:
        while len(self._buffer) >= HEADER.size:
            kind, index, length = HEADER.unpack_from(self._buffer)
            if len(self._buffer) < HEADER.size + length:
                return
            data = bytes(self._buffer[HEADER.size : HEADER.size + length])
            del self._buffer[: HEADER.size + length]
            if kind in (STDOUT, STDERR):
                yield Event(kind, self.spec.processes[index].rank, self.spec.host, data)
            else:
                yield self._event(kind, index, json.loads(data))

    def _event(self, kind: int, index: int, fact: dict[str, Any]) -> Event:
        if kind in (ENDED, LOST):
            self._unended.pop(index, None)
        return Event(kind, self.spec.processes[index].rank, self.spec.host, fact=fact)


class Crew:
    """All shims of a job and whatever else is waited for, in one thread.

    A context manager: on leaving, by whatever way, every process is ended, and waited for.
    """

    def __init__(self, specs: Sequence[Spec]) -> None:
        self.shims: list[Shim] = []
        self._specs = specs
        self._selector = selectors.DefaultSelector()
        self._events: list[Event] = []
        self._deadline: float | None = None
        """When ending is given up, on the clock time.monotonic()."""

    def __enter__(self) -> Crew:
        try:
            for spec in self._specs:
                started = Shim(spec)
                self.shims.append(started)
                assert started.popen.stdout is not None and started.popen.stderr is not None
                self.watch(started.popen.stdout.fileno(), partial(self._read, started))
                self.watch(started.popen.stderr.fileno(), started.hear)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._deadline is None:
            self.end(signal.SIGTERM)
        while any(each.open for each in self.shims) and self.patience() > 0:
            self.wait(self.patience())
        with self._selector:
            for each in self.shims:
                each.close(self.patience())

    def watch(self, descriptor: int, callback: Callable[[], bool]) -> None:
        """Call `callback` when `descriptor` is readable, for as long as it returns true."""
        self._selector.register(descriptor, selectors.EVENT_READ, callback)

    def wait(self, seconds: float = math.inf) -> list[Event]:
        """Return what has happened, waiting `seconds` at most for something."""
        for key, _ in self._selector.select(None if math.isinf(seconds) else seconds):
            if not key.data():
                self._selector.unregister(key.fd)
        events, self._events = self._events, []
        return events

    def end(self, number: int, grace: float = GRACE_SECONDS) -> None:
        """Ask all processes to end, once and for all."""
        self._deadline = time.monotonic() + grace + _LAST_SECONDS
        for each in self.shims:
            each.end(number, grace)

    def patience(self) -> float:
        """Return for how many seconds an end that was asked for is still to be waited for."""
        return math.inf if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def kill(self) -> None:
        """Kill all processes."""
        for each in self.shims:
            each.kill()

    def _read(self, source: Shim) -> bool:
        self._events += source.read()
        return source.open
