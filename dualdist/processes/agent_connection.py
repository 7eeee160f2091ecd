"""The launcher's side of the connection to one agent, the program of agent.py, which is started here or over ssh.

The agent reads its request from the standard input, so `ps` shows neither the environment nor the secret in it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import queue
import secrets
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..core.process import in_thread
from ..errors import ConfigurationError
from . import agent
from .agent import ENDED, ENDING_SIGNALS, HEADER, INPUT, LOST, PASSED_SIGNALS, RESULT, STDERR, STDOUT

_READ_SOURCE = "import sys;del sys.path[0];i=sys.stdin.buffer;exec(i.read(int(i.readline())))"
AGENT_COMMAND = (sys.executable, "-E", "-s", "-S", "-c", _READ_SOURCE)
"""Starts an agent, which reads its own source from its standard input. It imports nothing from the current
folder, where a file can have the name of a module of Python."""

_BEAT_SECONDS, _SILENCE_SECONDS = 5.0, 60.0
"""How often an agent on another host gets a sign of life, and after how long without one it ends its processes."""
_LAST_ERRORS_SECONDS = 1.0
"""How long to wait for ssh's exit, and its last error message, after the end of its output."""
_FOREGROUND_SECONDS = 1.0
"""How often to try to read from the terminal while this process is in its background."""
_CHUNK = 1 << 16
_READ_BYTES = 1 << 20
"""Size of a read from the agent, and of the pipe to it."""


@dataclass(frozen=True)
class HostJob:
    """The part of a job that runs on one host."""

    host: str
    agent_command: Sequence[str]
    """Starts the host's agent: AGENT_COMMAND, over ssh for another host."""
    command: Sequence[str]
    """What each process runs."""
    env: Mapping[str, str]
    """Variables of all the processes: on this host the whole environment, on another what is added to the login's."""
    own_env: Mapping[int, Mapping[str, str]]
    """Rank of each process -> variables of this process alone."""
    local: bool = True
    address: str | None = None
    """The launcher's address. If given, the agent sets Gloo's interface to the one that leads to it."""
    task: bytes | None = None
    """The content of a file for every process. Each gets its number and that of a pipe, for RESULT events."""
    has_own_output: bool = True
    """Whether the processes' output is sent to the launcher. Else they write to that of this process."""
    has_input: bool = False
    """Whether rank 0 is here, and gets the standard input of this process. The input of the others is empty."""
    window: int = 1 << 20
    """How many bytes of output the agent may send before the launcher has taken any."""


@dataclass(frozen=True)
class Event:
    """What happened to a process: STARTED, STDOUT, STDERR, RESULT or ENDED from its agent, or LOST (its host)."""

    kind: int
    rank: int
    host: str
    data: bytes = b""
    """What the process wrote, for STDOUT, STDERR and RESULT."""
    facts: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """STARTED: pid, threads (OMP_NUM_THREADS if the agent set it). ENDED: code (negative: a signal), time, error (why
    it could not start). LOST: error (what happened to its host)."""


def describe_exit(code: int) -> str:
    """Return in words how a process ended. code: as in subprocess, minus the signal that ended it."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


class AgentConnection:
    """Starts the agent of one host and exchanges messages with it."""

    def __init__(self, job: HostJob) -> None:
        self.job = job
        self.open = True
        """Whether more messages may arrive."""
        self.greeted = False
        """Whether the agent has answered."""
        self._errors = b""
        """The standard error of the agent or ssh."""
        self._token = secrets.token_hex(16)
        """The agent's first output. A login shell may print something before."""
        self._buffer = bytearray()
        self._unended = set(job.own_env)
        self._taken = 0
        """Bytes of output that were read since the last grant."""
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        shared = [] if job.has_own_output else [1, 2]
        if job.local and job.has_input:
            shared.append(0)
        # An agent has files of its own below 3.
        files = {number: fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3) for number in shared}
        # A scheduler may signal all processes of a job. ssh must survive that, and an agent from its start.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*ENDING_SIGNALS, *PASSED_SIGNALS))
        try:
            self._outbox.put(_first_message(job, self._token, files))
            self.popen = subprocess.Popen(
                job.agent_command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=tuple(files.values()),
                bufsize=0,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for file in files.values():
                os.close(file)
        pipes: Any = self.popen
        self._stdin, self.stdout, self.stderr = pipes.stdin, pipes.stdout, pipes.stderr
        os.set_blocking(self.stderr.fileno(), False)
        if job.local:
            # With a larger pipe, agent and launcher take turns less often. Some users may not enlarge it: pipe(7).
            with contextlib.suppress(OSError):
                fcntl.fcntl(self.stdout.fileno(), fcntl.F_SETPIPE_SZ, _READ_BYTES)
        self._sender = in_thread(self._send, f"dualdist-{job.host}")

    def _send(self) -> None:
        """Send messages, and a sign of life every few seconds. Runs in its own thread, because a write may block."""
        with contextlib.suppress(OSError), self._stdin:
            while True:
                try:
                    data = self._outbox.get(timeout=_BEAT_SECONDS)
                except queue.Empty:
                    data = b"\n"
                if data is None:
                    return
                agent.write_all(self._stdin.fileno(), data)

    def _send_input(self) -> None:
        """Send a piece of the standard input, or its end. Runs in its own thread, because a read may block."""
        data = _read_input()
        self.send(b"input %d\n%b" % (len(data), data))

    def grant(self) -> None:
        if self._taken >= self.job.window // 2:
            self.send(b"grant %d\n" % self._taken)
            self._taken = 0

    def send(self, command: bytes) -> None:
        self._outbox.put(command)

    def end(self, number: int, grace: float) -> None:
        if not self.greeted:
            # Ends the agent or its ssh. An agent that still starts on another host finds the end of its input and ends.
            self._kill()
        self.send(b"end %d %f\n" % (number, grace))

    def _kill(self) -> None:
        """Kill the agent or its ssh, and what a script in place of ssh has started."""
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)

    def close(self, timeout: float) -> None:
        """Wait for the end of the agent, `timeout` seconds at most. After that, end its input, and later kill it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout)
        self._outbox.put(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(2 * _AGENT_SECONDS)
        self._kill()
        self.popen.wait()
        wait([self._sender])
        self.stdout.close()
        self.stderr.close()

    def read(self) -> Iterator[Event]:
        """Wait for messages and yield them. At the end of the connection, each process that still ran is lost."""
        data = os.read(self.stdout.fileno(), _READ_BYTES)
        self._buffer += data
        if not self.greeted:
            _, token, rest = self._buffer.partition(self._token.encode())
            self.greeted = bool(token)
            self._buffer = rest if token else self._buffer[-len(self._token) :]
        if self.greeted:
            yield from self._messages()
        self.open = bool(data)
        if self._unended and not self.open:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(_LAST_ERRORS_SECONDS)
            self.read_errors()
            happened = "the connection was lost" if self.greeted else "it could not be reached"
            facts = {"error": ": ".join(filter(None, (happened, self.errors())))}
            yield from (Event(LOST, rank, self.job.host, facts=facts) for rank in sorted(self._unended))

    def read_errors(self) -> bool:
        """Record the errors that ssh prints. Return whether more may follow."""
        data = self.stderr.read(_CHUNK)  # None: nothing now
        self._errors = (self._errors + (data or b""))[-_CHUNK:]
        return bool(data != b"")

    def errors(self) -> str:
        return "; ".join(self._errors.decode(errors="replace").splitlines()).strip("; ")

    def _messages(self) -> Iterator[Event]:
        end = 0
        while len(self._buffer) >= end + HEADER.size:
            kind, rank, length = HEADER.unpack_from(self._buffer, end)
            start = end + HEADER.size
            if len(self._buffer) < start + length:
                break
            end = start + length
            data = bytes(memoryview(self._buffer)[start:end])
            if kind in (STDOUT, STDERR, RESULT):
                self._taken += length
                yield Event(kind, rank, self.job.host, data)
            elif kind == INPUT:
                in_thread(self._send_input, "dualdist-input")
            else:
                if kind == ENDED:
                    self._unended.discard(rank)
                yield Event(kind, rank, self.job.host, facts=json.loads(data))
        del self._buffer[:end]


def _first_message(job: HostJob, token: str, files: Mapping[int, int]) -> bytes:
    """Return the source of the agent and the request to it. The agent sends `token` before any other output.

    files: those of the processes' standard streams that are this process's.
    """
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise ConfigurationError("The working directory must exist, but was removed. Change to another one.") from None
    request = {
        "token": token,
        "argv": list(map(_portable, job.command)),
        "cwd": _portable(folder),
        "env": _portable_env(job.env),
        "own_env": {str(rank): _portable_env(env) for rank, env in job.own_env.items()},
        "inherit": not job.local,
        "parent": os.getpid() if job.local else None,
        "silence": 0 if job.local else _SILENCE_SECONDS,
        "address": job.address,
        "output": None if job.has_own_output else [files[1], files[2]],
        "stdin": files.get(0, subprocess.PIPE if job.has_input else subprocess.DEVNULL),
        "window": job.window,
        "task": None if job.task is None else len(job.task),
    }
    source = Path(agent.__file__).read_bytes()
    text = json.dumps(request).encode()
    return b"%d\n%b%d\n%b%b" % (len(source), source, len(text), text, job.task or b"")


def _portable(text: str) -> str:
    """Return `text` in a form that JSON carries without loss, whatever its bytes are."""
    return os.fsencode(text).decode("latin-1")


def _portable_env(env: Mapping[str, str]) -> dict[str, str]:
    return {_portable(name): _portable(value) for name, value in env.items()}


def _read_input() -> bytes:
    """Return the next bytes of the standard input; none at its end, and if it cannot be read, as under nohup.

    In the background of a terminal, wait: a read would stop the whole process, unless this thread blocks SIGTTIN.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTIN])
    while True:
        try:
            return os.read(0, _CHUNK)
        except BlockingIOError:  # another program has made it non-blocking
            select.select([0], [], [])
            continue
        except OSError as error:
            if error.errno != errno.EIO or not os.isatty(0):
                return b""
        time.sleep(_FOREGROUND_SECONDS)


# All processes of a job: starting them on every host, waiting for events, and ending them everywhere.

_GRACE_SECONDS = 4.0
"""Between the signal that asks a process to end, and SIGKILL."""
_AGENT_SECONDS = 4.0
"""How long an agent may take to end after that. Over a broken connection it does not end at all."""


class Supervisor:
    """The agents of all hosts of a job, and other files to wait for, in one thread.

    A context manager. At the end of the block, however it is left, every process is ended and waited for.
    """

    def __init__(self, host_jobs: Sequence[HostJob]) -> None:
        self.agents: list[AgentConnection] = []
        self._host_jobs = host_jobs
        self._selector = selectors.DefaultSelector()
        self._events: list[Event] = []
        self._deadline: float | None = None
        """When to stop waiting for the end of the processes, on the clock time.monotonic()."""

    def __enter__(self) -> Supervisor:
        try:
            for host_job in self._host_jobs:
                connection = AgentConnection(host_job)
                self.agents.append(connection)
                self.watch(connection.stdout.fileno(), partial(self._read, connection))
                self.watch(connection.stderr.fileno(), connection.read_errors)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._deadline is None:
            self.end(signal.SIGTERM)
        while any(connection.open for connection in self.agents) and self.time_left() > 0:
            self.wait(self.time_left())
        with self._selector:
            for connection in self.agents:
                connection.close(self.time_left())

    def watch(self, descriptor: int, callback: Callable[[], bool]) -> None:
        """Call `callback` whenever `descriptor` is readable, until it returns false."""
        self._selector.register(descriptor, selectors.EVENT_READ, callback)

    def wait(self, seconds: float = math.inf) -> list[Event]:
        """Wait for something to happen, `seconds` at most, and return the new events, possibly none."""
        for key, _ in self._selector.select(None if math.isinf(seconds) else seconds):
            if not key.data():
                self._selector.unregister(key.fd)
        events, self._events = self._events, []
        return events

    def grant(self) -> None:
        """Let the processes write as many more bytes as were read since the last grant."""
        for connection in self.agents:
            connection.grant()

    def send(self, command: bytes) -> None:
        """Send a command to all agents (see Agent._listen). Does not wait."""
        for connection in self.agents:
            connection.send(command)

    def end(self, number: int, grace: float = _GRACE_SECONDS) -> None:
        """Ask all processes to end by signal `number`. Those alive after `grace` seconds are killed."""
        self._deadline = time.monotonic() + grace + _AGENT_SECONDS
        for connection in self.agents:
            connection.end(number, grace)

    def time_left(self) -> float:
        """Return for how many seconds to wait for the end of the processes; infinite before `end`."""
        return math.inf if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _read(self, connection: AgentConnection) -> bool:
        self._events += connection.read()
        return connection.open
