"""One job of `dualdist run`, `run` or `spawn`: what its processes get, its hosts' agents, and its events.

Each job has a server where its processes meet, and an agent on each host, the program of agent.py, which starts the
processes there and sends them the signals that end them. An agent is started here or over ssh. It reads its request
from the standard input, so `ps` shows neither the environment nor the secret in it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import queue
import re
import secrets
import select
import selectors
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..copies import COPIES, OF_LAUNCHER, agent_variables, copied_variables, torchrun_variables
from ..core import extension, needed
from ..core.checks import wrong
from ..core.launch import DUALDIST_RUN, RENDEZVOUS, SECRET, topology, without_copies
from ..core.launch.launchers import LAUNCHERS, NUMBERS
from ..core.meeting.links import INTERFACE, LOOPBACK
from ..core.meeting.server import MeetingServer, reserved_port
from ..core.process import in_thread
from ..core.types import World
from ..errors import ConfigurationError
from ..other_launchers import NAMED_BY
from ..slurm import LOWEST_PORT, PORTS
from .agent import (
    ENDED,
    ENDING_SIGNALS,
    HEADER,
    INPUT,
    LOST,
    PASSED_SIGNALS,
    RESULT,
    STARTED,
    STDERR,
    STDOUT,
    write_all,
)
from .hosts import (
    AGENT_COMMAND,
    DEFAULT_STARTER,
    HOST_VARIABLES,
    Host,
    address_of,
    address_towards,
    agent_command,
    assign,
    is_local,
)
from .output import MOST_UNWRITTEN, Output


@dataclass(frozen=True)
class RunOptions:
    """The options of a job of `dualdist run`, `run` or `spawn`."""

    command: Sequence[str]
    """What each process runs."""
    hosts: Sequence[Host]
    size: int | None = None
    """None: all slots of the hosts."""
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Variables to set for the processes, in addition to the environment or instead of its values."""
    output: Path | None = None
    timestamps: bool = False
    ssh_port: int | None = None
    ssh_identity: str | None = None
    start_with: str = DEFAULT_STARTER
    """What starts the agents of other hosts: a key of STARTERS."""
    start_timeout: float = 30.0
    """How many seconds to wait for each host to answer."""
    verbose: bool = False
    launcher: str = DUALDIST_RUN
    """What DUALDIST_LAUNCHER is in the processes."""
    task: bytes | None = None
    """The content of a file for every process. Each gets its number and that of a pipe, for RESULT events."""
    has_own_output: bool = True
    """Whether the output is written here, in whole lines. Else the processes of this host write to the same files."""
    has_input: bool = False
    """Whether rank 0 gets the standard input of this process. The input of the others is empty."""

    @property
    def ssh_options(self) -> list[str]:
        options = ["-o", f"ConnectTimeout={max(1, int(self.start_timeout) - 1)}"]
        options += ["-p", str(self.ssh_port)] if self.ssh_port is not None else []
        return options + (["-i", self.ssh_identity] if self.ssh_identity is not None else [])


def read_start_timeout(given: str | None, env: Mapping[str, str]) -> float:
    """Return how many seconds to wait for each host: --start-timeout if it is `given`, else HOROVOD_START_TIMEOUT."""
    source = "--start-timeout" if given is not None else "HOROVOD_START_TIMEOUT"
    text = given if given is not None else env.get(source) or "30"
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= 86400:
            return float(text)
    raise wrong(source, "a number of seconds above 0, a day at most", text, error=ConfigurationError)


# The environment of the processes: what they get from this one, and their place in the job.


def without_launchers(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without the variables that launchers have set for this process."""
    env = without_copies(env)
    known = {COPIES, *NAMED_BY.values(), *filter(None, map(env.get, NAMED_BY.values()))}
    known |= {getattr(row, field) for row in LAUNCHERS for field in NUMBERS}
    known |= {marker.partition("=")[0] for row in LAUNCHERS for marker in row.markers}
    more = re.compile("|".join(row.more for row in LAUNCHERS if row.more))
    return {name: value for name, value in env.items() if name not in known and not more.fullmatch(name)}


def process_variables(launcher: str, world: World, rendezvous: str, secret: bytes) -> dict[str, str]:
    """Return the variables that give one process its place in the job. core/launch/ and core/meeting/ read them."""
    numbers = {f"DUALDIST_{name.upper()}": str(getattr(world, name)) for name in NUMBERS}
    return {"DUALDIST_LAUNCHER": launcher, **numbers, RENDEZVOUS: rendezvous, SECRET: secret.hex()}


# The connection to an agent, and what it reports.

_ALL_WINDOWS, _LARGEST_WINDOW, _SMALLEST_WINDOW = 64 << 20, 1 << 20, 64 << 10
"""Bytes of output that may be sent before any is read: by all hosts together, and by one host at most and at least."""
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

    def __init__(
        self,
        options: RunOptions,
        host: str,
        command: Sequence[str],
        env: Mapping[str, str],
        own_env: Mapping[int, Mapping[str, str]],
        *,
        is_local: bool = True,
        address: str | None = None,
        window: int = _LARGEST_WINDOW,
    ) -> None:
        """Start the agent.

        command: AGENT_COMMAND, over ssh for another host. env: of all the processes: on this host the whole
        environment, on another what is added to the login's. own_env: rank of each process -> its own variables.
        address: the launcher's. If given, the agent sets Gloo's interface to the one that leads to it. window: how many
        bytes of output the agent may send before the launcher has taken any.
        """
        self.host, self.is_local = host, is_local
        self.open = True
        """Whether more messages may arrive."""
        self.greeted = False
        """Whether the agent has answered."""
        self._errors = b""
        """The standard error of the agent or ssh."""
        self._token = secrets.token_hex(16)
        """The agent's first output. A login shell may print something before."""
        self._buffer = bytearray()
        self._unended = set(own_env)
        self._window, self._taken = window, 0
        """`_taken`: bytes of output that were read since the last grant."""
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        folder, has_input = _portable(_folder()), options.has_input and 0 in own_env
        # The processes' standard streams that are this process's. An agent has files of its own below 3.
        shared = [1, 2] * (is_local and not options.has_own_output) + [0] * (is_local and has_input)
        files = {number: fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3) for number in shared}
        request = {
            "token": self._token,
            "argv": list(map(_portable, options.command)),
            "cwd": folder,
            "env": _portable_env(env),
            "own_env": {str(rank): _portable_env(variables) for rank, variables in own_env.items()},
            "inherit": not is_local,
            "parent": os.getpid() if is_local else None,
            "silence": 0 if is_local else _SILENCE_SECONDS,
            "address": address,
            "output": [files[1], files[2]] if 1 in files else None,
            "stdin": files.get(0, subprocess.PIPE if has_input else subprocess.DEVNULL),
            "window": window,
            "task": None if options.task is None else len(options.task),
        }
        source, text = Path(__file__).with_name("agent.py").read_bytes(), json.dumps(request).encode()
        self.send(b"%d\n%b%d\n%b%b" % (len(source), source, len(text), text, options.task or b""))
        # A scheduler may signal all processes of a job. ssh must survive that, and an agent from its start.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*ENDING_SIGNALS, *PASSED_SIGNALS))
        try:
            self.popen = subprocess.Popen(
                command,
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
        if is_local:
            # With a larger pipe, agent and launcher take turns less often. Some users may not enlarge it: pipe(7).
            with contextlib.suppress(OSError):
                fcntl.fcntl(self.stdout.fileno(), fcntl.F_SETPIPE_SZ, _READ_BYTES)
        self._sender = in_thread(self._send, f"dualdist-{host}")

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
                write_all(self._stdin.fileno(), data)

    def _send_input(self) -> None:
        """Send a piece of the standard input, or its end. Runs in its own thread, because a read may block."""
        data = _read_input()
        self.send(b"input %d\n%b" % (len(data), data))

    def grant(self) -> None:
        if self._taken >= self._window // 2:
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
            yield from (Event(LOST, rank, self.host, facts=facts) for rank in sorted(self._unended))

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
                yield Event(kind, rank, self.host, data)
            elif kind == INPUT:
                in_thread(self._send_input, "dualdist-input")
            else:
                if kind == ENDED:
                    self._unended.discard(rank)
                yield Event(kind, rank, self.host, facts=json.loads(data))
        del self._buffer[:end]


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigurationError("The working directory must exist, but was removed. Change to another one.") from None


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


_GRACE_SECONDS = 4.0
"""Between the signal that asks a process to end, and SIGKILL."""
_AGENT_SECONDS = 4.0
"""How long an agent may take to end after that. Over a broken connection it does not end at all."""


class Job:
    """The processes of a running job. Their output is written here, and what else happens to them is reported.

    A context manager. At the end of the block, however it is left, every process is ended and waited for.
    """

    def __init__(self, options: RunOptions, size: int, output: Output) -> None:
        self.output = output
        self.running = set(range(size))
        """The ranks of the processes that have not ended."""
        self.agents: dict[str, AgentConnection] = {}
        """By their hosts."""
        self._options = options
        self._start_by = time.monotonic() + options.start_timeout
        self._selector = selectors.DefaultSelector()
        self._events: list[Event] = []
        self._deadline: float | None = None
        """When to stop waiting for the end of the processes, on the clock time.monotonic()."""
        self.watch(output.reader, output.empty_reader)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self._deadline is None:
            self.end(signal.SIGTERM)
        while any(agent.open for agent in self.agents.values()) and self.time_left() > 0:
            self._select(self.time_left())
        with self._selector:
            for agent in self.agents.values():
                agent.close(self.time_left())

    def add(self, agent: AgentConnection) -> None:
        """Follow what the processes of another host do."""
        self.agents[agent.host] = agent
        self.watch(agent.stdout.fileno(), partial(self._read, agent))
        self.watch(agent.stderr.fileno(), agent.read_errors)

    def watch(self, descriptor: int, callback: Callable[[], bool]) -> None:
        """Call `callback` whenever `descriptor` is readable, until it returns false."""
        self._selector.register(descriptor, selectors.EVENT_READ, callback)

    def wait(self, until: float) -> list[Event]:
        """Wait for something to happen, and return the new events that are no output.

        until: when to stop waiting, on the clock time.monotonic(). Hosts that do not answer in time end it earlier.
        """
        now = time.monotonic()
        if now < self._start_by and self._silent():
            until = min(until, self._start_by)
        self._select(max(0.0, until - now))
        others = []
        for event in self._events:
            if event.kind in (STDOUT, STDERR):
                self.output.write(event.rank, event.kind, event.data)
                continue
            others.append(event)
            if event.kind in (ENDED, LOST):
                self.running.discard(event.rank)
                self.output.close_rank(event.rank)
            elif event.kind == STARTED and self._options.verbose:
                pid, threads = event.facts["pid"], event.facts["threads"]
                chosen = "" if threads is None else f", with OMP_NUM_THREADS={threads} because it was not set"
                self.output.report(f"rank {event.rank} on {event.host} is process {pid}{chosen}.")
        self._events.clear()
        self.output.check()
        if self.output.unwritten() < MOST_UNWRITTEN:
            for agent in self.agents.values():
                agent.grant()
        return others

    def _select(self, seconds: float) -> None:
        for key, _ in self._selector.select(None if math.isinf(seconds) else seconds):
            if not key.data():
                self._selector.unregister(key.fd)

    def _read(self, agent: AgentConnection) -> bool:
        self._events += agent.read()
        return agent.open

    def send(self, command: bytes) -> None:
        """Send a command to all agents (see Agent._listen). Does not wait."""
        for agent in self.agents.values():
            agent.send(command)

    def end(self, number: int, grace: float = _GRACE_SECONDS) -> None:
        """Ask all processes to end by signal `number`. Those alive after `grace` seconds are killed."""
        self._deadline = time.monotonic() + grace + _AGENT_SECONDS
        for agent in self.agents.values():
            agent.end(number, grace)

    def time_left(self) -> float:
        """Return for how many seconds to wait for the end of the processes; infinite before `end`."""
        return math.inf if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def silent_hosts(self, limit: str) -> str | None:
        """Return which hosts have not answered in time, and what ssh printed; None if all have.

        limit: the time, as the text is to name it.
        """
        silent = self._silent()
        if not silent or time.monotonic() < self._start_by:
            return None
        names = ", ".join(agent.host for agent in silent)
        errors = "; ".join(filter(None, (agent.errors() for agent in silent)))
        return f"{names} did not answer within {limit}{f': {errors}' if errors else ''}"

    def _silent(self) -> list[AgentConnection]:
        return [agent for agent in self.agents.values() if not agent.greeted]


# Before the processes start: the servers that they need, and the part of each host.


@contextlib.contextmanager
def started(options: RunOptions, env: Mapping[str, str]) -> Iterator[Job]:
    """Start the job of `options`, and end all its processes when the block ends. env: of this process.

    Raises ConfigurationError, before it starts anything, when the options do not fit the hosts.
    """
    hosts = assign(options.hosts, options.size)
    remote = [host for host in dict.fromkeys(hosts) if not is_local(host)]
    local = [host for host in dict.fromkeys(hosts) if host not in remote]
    if len(local) > 1:
        raise ConfigurationError(
            f"`-H` must have one name for each host, but {' and '.join(local)} are all this one, whose processes would "
            "share its GPUs. Use one name, with all slots."
        )
    interface = options.variables.get(INTERFACE)
    address = address_towards(remote[0], env, interface) if remote else LOOPBACK
    first = address_of(hosts[0], env) if hosts[0] in remote else None
    common = without_launchers(env)
    horovod = extension("horovod")
    if horovod is not None and not horovod.is_installed():
        # Then `import horovod` imports dualdist.compat.
        common["PYTHONPATH"] = os.pathsep.join(filter(None, [common.get("PYTHONPATH"), horovod.CHILDREN_FOLDER]))
    if options.has_own_output:
        # Python's buffer delays the output, so horovodrun sets PYTHONUNBUFFERED too.
        common |= {"PYTHONUNBUFFERED": common.get("PYTHONUNBUFFERED") or "1"}
    # As horovodrun does, other hosts get all variables but those of this host.
    exported = {name: value for name, value in common.items() if not re.fullmatch(HOST_VARIABLES, name)}
    commands: dict[str, Sequence[str]] = dict.fromkeys(local, AGENT_COMMAND)
    commands |= {host: agent_command(options.start_with, host, env, address, options.ssh_options) for host in remote}
    with contextlib.ExitStack() as stack:
        own_env = _serve(options, hosts, address, first, common, stack)
        output = stack.enter_context(Output(len(hosts), options.output, timestamps=options.timestamps))
        job = stack.enter_context(Job(options, len(hosts), output))
        for host, variables in own_env.items():
            job.add(
                AgentConnection(
                    options,
                    host,
                    commands[host],
                    {**(exported if host in remote else common), **options.variables},
                    variables,
                    is_local=host in local,
                    address=address if remote else None,
                    window=max(_SMALLEST_WINDOW, min(_LARGEST_WINDOW, _ALL_WINDOWS // len(own_env))),
                )
            )
        yield job


def _serve(
    options: RunOptions,
    hosts: Sequence[str],
    address: str,
    first: str | None,
    env: Mapping[str, str],
    stack: contextlib.ExitStack,
) -> Mapping[str, Mapping[int, Mapping[str, str]]]:
    """Start the servers of a job, which `stack` ends. Return the variables of each process, by its host and rank.

    For scripts without dualdist, too: one with `import horovod.torch` needs an HTTP server where Horovod's controllers
    meet (without Horovod installed, dualdist.compat replaces it), one with torch.distributed an address for rank 0's
    store.

    hosts: of each rank. address: of this machine, at which all processes reach it. first: the address of rank 0's host;
    None if it is this machine. env: the other variables of all processes.
    """
    worlds = topology([(host, None) for host in hosts])
    secret = secrets.token_bytes(32)
    server = stack.enter_context(MeetingServer(len(hosts), [address], secret))
    if first is None:
        first, port = address, stack.enter_context(reserved_port())
    else:
        port = LOWEST_PORT + secrets.randbelow(PORTS)
    rendezvous = None
    horovod = extension("horovod")
    if horovod is not None and horovod.is_installed():
        http = needed("horovods_store")
        store = stack.enter_context(http.HttpStore(address, http.horovods_scopes(hosts, worlds)))
        rendezvous = store.host, store.port
    interface = "lo" if address == LOOPBACK else None
    of_torchruns_agent = agent_variables(OF_LAUNCHER + secrets.token_hex(8), {**env, **options.variables})
    found: dict[str, dict[int, Mapping[str, str]]] = defaultdict(dict)
    for host, world in zip(hosts, worlds, strict=True):
        torchruns = torchrun_variables(world, hosts, (first, port)) | of_torchruns_agent
        horovods = {} if horovod is None else horovod.horovod_variables(world, rendezvous, host, interface)
        own = process_variables(options.launcher, world, f"{address}:{server.port}", secret)
        found[host][world.rank] = copied_variables(torchruns, horovods, given=options.variables) | own
    return found
