"""One job: the processes on all hosts, their output, and how they end.

`dualdist run` runs a command in them (run_job), and `run` and `spawn` a function (function.py). Each job has a server
where its processes meet, an agent on each host, which starts them, and a Supervisor, which ends them everywhere.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from ..copies import COPIES, OF_LAUNCHER, add_copies, agent_variables, torchrun_variables
from ..core import extension, needed
from ..core.checks import wrong
from ..core.launch import DUALDIST_RUN, RENDEZVOUS, SECRET, topology, without_copies
from ..core.launch.launchers import LAUNCHERS, NUMBERS
from ..core.meeting.links import INTERFACE, LOOPBACK, interface_of
from ..core.meeting.server import MeetingServer, reserved_port
from ..core.types import World
from ..errors import ConfigurationError
from ..other_launchers import NAMED_BY
from ..slurm import LOWEST_PORT, PORTS
from .agent import ENDED, ENDING_SIGNALS, LOST, PASSED_SIGNALS, STARTED, STDERR, STDOUT, grace_of
from .agent_connection import AGENT_COMMAND, Event, HostJob, Supervisor, describe_exit
from .hosts import DEFAULT_STARTER, HOST_VARIABLES, Host, address_of, address_towards, agent_command, assign, is_local
from .output import MOST_UNWRITTEN, Output

_ALL_WINDOWS, _LARGEST_WINDOW, _SMALLEST_WINDOW = 64 << 20, 1 << 20, 64 << 10
"""Bytes of output that may be sent before any is read: by all hosts together, and by one host at most and at least."""


@dataclass(frozen=True)
class RunOptions:
    """The options of a job of `dualdist run`, `run` or `spawn`."""

    command: Sequence[str]
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
    """See HostJob."""
    has_own_output: bool = True
    """Whether the output is written here, in whole lines. Else the processes of this host write to the same files."""
    has_input: bool = False
    """Whether rank 0 gets the standard input of this process."""

    @property
    def ssh_options(self) -> list[str]:
        options = ["-o", f"ConnectTimeout={max(1, int(self.start_timeout) - 1)}"]
        options += ["-p", str(self.ssh_port)] if self.ssh_port is not None else []
        return options + (["-i", self.ssh_identity] if self.ssh_identity is not None else [])


def read_start_timeout(given: str | None, env: Mapping[str, str]) -> float:
    """Return how many seconds to wait for each host: --start-timeout if it is `given`, else HOROVOD_START_TIMEOUT."""
    source = "--start-timeout"
    if given is None:
        source, given = "HOROVOD_START_TIMEOUT", env.get("HOROVOD_START_TIMEOUT") or "30"
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86400:
        raise wrong(source, "a number of seconds above 0, a day at most", given, error=ConfigurationError)
    return seconds


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


def copied_variables(*groups: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return `groups` of variables, one for each launcher, and DUALDIST_COPIES.

    given: variables that the user has set for the processes. A group with one of them is left out: it would contradict.
    """
    copies: dict[str, str] = {}
    for group in groups:
        if given.keys().isdisjoint(group):
            add_copies(group, copies)
    return copies


# What a job needs before its processes start: its servers, and the processes of each host.


def _prepared(options: RunOptions, env: Mapping[str, str], stack: contextlib.ExitStack) -> list[HostJob]:
    """Start the servers of a job, which `stack` ends, and return the part of each host. env: of this process.

    Raises ConfigurationError when the options do not fit the hosts.
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
    secret = secrets.token_bytes(32)
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
    worlds = topology([(host, None) for host in hosts])
    server = stack.enter_context(MeetingServer(len(hosts), [address], secret))
    copies = _serve_unchanged_scripts(hosts, worlds, address, first, options.variables, common, stack)
    own_env: dict[str, dict[int, dict[str, str]]] = defaultdict(dict)
    for host, world, copied in zip(hosts, worlds, copies, strict=True):
        own = process_variables(options.launcher, world, f"{address}:{server.port}", secret)
        own_env[host][world.rank] = copied | own
    window = max(_SMALLEST_WINDOW, min(_LARGEST_WINDOW, _ALL_WINDOWS // len(own_env)))
    return [
        HostJob(
            host,
            agent_command(options.start_with, host, env, address, options.ssh_options)
            if host in remote
            else AGENT_COMMAND,
            options.command,
            {**(exported if host in remote else common), **options.variables},
            own_env[host],
            local=host not in remote,
            address=address if remote else None,
            task=options.task,
            has_own_output=host in remote or options.has_own_output,
            has_input=options.has_input and host == hosts[0],
            window=window,
        )
        for host in own_env
    ]


# What scripts that do not use dualdist need to join the world of `dualdist run` and `spawn`.
#
# A script with `import horovod.torch` needs an HTTP server where Horovod's controllers meet; without Horovod installed,
# dualdist.compat replaces it. A script with torch.distributed needs an address for rank 0's store.


def _serve_unchanged_scripts(
    hosts: Sequence[str],
    worlds: Sequence[World],
    address: str,
    first: str | None,
    given: Mapping[str, str],
    env: Mapping[str, str],
    stack: contextlib.ExitStack,
) -> list[dict[str, str]]:
    """Return the variables of each rank, which are valid until `stack` ends.

    hosts, worlds: of each rank. address: of this machine, at which all processes reach it. first: the address of rank
    0's host; None if it is this machine. given: what the user has set for the processes. env: their other variables.
    """
    if first is None:
        first, port = address, stack.enter_context(reserved_port())
    else:
        port = LOWEST_PORT + secrets.randbelow(PORTS)
    rendezvous = interface = None
    horovod = extension("horovod")
    if horovod is not None and horovod.is_installed():
        interface = interface_of(address) if address == LOOPBACK else None
        http = needed("horovods_store")
        store = stack.enter_context(http.HttpStore(address, http.horovods_scopes(hosts, worlds)))
        rendezvous = store.host, store.port
    agent = agent_variables(OF_LAUNCHER + secrets.token_hex(8), {**env, **given})
    return [
        copied_variables(
            torchrun_variables(world, hosts, (first, port)) | agent,
            {} if horovod is None else horovod.horovod_variables(world, rendezvous, host, interface),
            given=given,
        )
        for host, world in zip(hosts, worlds, strict=True)
    ]


# A running job.


class Job:
    """The processes of a running job. Their output is written here, and what else happens to them is reported."""

    def __init__(self, options: RunOptions, host_jobs: Sequence[HostJob], stack: contextlib.ExitStack) -> None:
        self.hosts = {host_job.host: host_job for host_job in host_jobs}
        self.size = sum(len(host_job.own_env) for host_job in host_jobs)
        self.output = stack.enter_context(Output(self.size, options.output, timestamps=options.timestamps))
        self.supervisor = stack.enter_context(Supervisor(host_jobs))
        self.running = set(range(self.size))
        """The ranks of the processes that have not ended."""
        self._options = options
        self._start_by = time.monotonic() + options.start_timeout
        self.supervisor.watch(self.output.reader, self.output.empty_reader)

    def wait(self, until: float) -> list[Event]:
        """Wait for something to happen, and return the new events that are no output.

        until: when to stop waiting, on the clock time.monotonic(). Hosts that do not answer in time end it earlier.
        """
        now = time.monotonic()
        if now < self._start_by and not all(agent.greeted for agent in self.supervisor.agents):
            until = min(until, self._start_by)
        events = []
        for event in self.supervisor.wait(max(0.0, until - now)):
            if event.kind in (STDOUT, STDERR):
                self.output.write(event.rank, event.kind, event.data)
                continue
            events.append(event)
            if event.kind in (ENDED, LOST):
                self.running.discard(event.rank)
                self.output.close_rank(event.rank)
            elif event.kind == STARTED and self._options.verbose:
                pid, threads = event.facts["pid"], event.facts["threads"]
                chosen = "" if threads is None else f", with OMP_NUM_THREADS={threads} because it was not set"
                self.output.report(f"rank {event.rank} on {event.host} is process {pid}{chosen}.")
        self.output.check()
        if self.output.unwritten() < MOST_UNWRITTEN:
            self.supervisor.grant()
        return events

    def silent_hosts(self, limit: str) -> str | None:
        """Return which hosts have not answered in time, and what ssh printed; None if all have.

        limit: the time, as the text is to name it.
        """
        silent = [agent for agent in self.supervisor.agents if not agent.greeted]
        if not silent or time.monotonic() < self._start_by:
            return None
        names = ", ".join(agent.job.host for agent in silent)
        errors = "; ".join(filter(None, (agent.errors() for agent in silent)))
        return f"{names} did not answer within {limit}{f': {errors}' if errors else ''}"


@contextlib.contextmanager
def started(options: RunOptions, env: Mapping[str, str]) -> Iterator[Job]:
    """Start the job of `options`, and end all its processes when the block ends. env: of this process.

    Raises ConfigurationError, before it starts anything, when the options do not fit the hosts.
    """
    with contextlib.ExitStack() as stack:
        yield Job(options, _prepared(options, env, stack), stack)


# `dualdist run`: when a process fails, all others are ended, and its exit code is that of the job. A signal to the
# launcher is passed on to all processes. A second Ctrl-C kills them; schedulers may repeat other signals. All this
# works even while nobody reads the output.

_SIGNALS = (*ENDING_SIGNALS, *PASSED_SIGNALS)
_OUTPUT_SECONDS, _LAST_OUTPUT_SECONDS = 4.0, 1.0
"""How long the launcher waits for its output to be read after the first signal, and after a later one."""


def run_job(options: RunOptions, env: Mapping[str, str]) -> int:
    """Run the job to its end and return its exit code. env: the environment of this process.

    In the main thread alone: it handles signals. Raises ConfigurationError first, if the options do not fit the hosts.
    """
    with _signals() as signals, started(options, env) as job:
        return _Ending(job, signals, options.start_timeout).follow()


class _Ending:
    """Follows a job until its processes have ended, and finds its exit code."""

    def __init__(self, job: Job, signals: int, start_timeout: float) -> None:
        """signals: a file with the numbers of the signals that arrive."""
        self._job = job
        self._signals = signals
        self._start_timeout = start_timeout
        self._code: int | None = None
        """The exit code of the job, None until something ends it."""
        self._signalled = False
        """Whether it is that of a signal to the launcher. A process may still set another one."""
        self._patience = math.inf
        """Until when to wait for the output to be read, on the clock time.monotonic()."""
        job.supervisor.watch(signals, self._take_signals)

    def follow(self) -> int:
        """Wait until all processes have ended and their output is written; return the exit code."""
        job = self._job
        while job.running and (left := job.supervisor.time_left()) > 0:
            for event in job.wait(time.monotonic() + left):
                self._handle(event)
            silent = job.silent_hosts(f"{self._start_timeout:g} s (see --start-timeout)")
            if silent is not None:
                self._fail(1, silent)
        # After a signal, wait only for a short time until the output is read.
        job.output.end_lines()
        self._patience = max(self._patience, time.monotonic() + _LAST_OUTPUT_SECONDS)
        while job.output.unwritten() and time.monotonic() < self._patience:
            job.wait(self._patience)
        return self._code or 0

    def _handle(self, event: Event) -> None:
        if event.kind == LOST:
            self._fail(255, f"{event.host}, with rank {event.rank}, is lost: {event.facts['error']}")
        elif event.kind == ENDED:
            who, code, error = f"rank {event.rank} on {event.host}", event.facts["code"], event.facts["error"]
            if error is not None:
                self._fail(code, f"{who} could not be started: {error}")
            elif self._signalled and code > 1:
                # It has saved its state, perhaps. 1 is the code of an exception, as when another one has ended sooner.
                self._code, self._signalled = code, False
            elif code != 0:
                self._fail(code if code > 0 else 128 - code, f"{who} {describe_exit(code)}")

    def _fail(self, code: int, reason: str) -> None:
        """End the job with exit code `code`, unless it is already ending."""
        if self._code is not None:
            return
        self._code = code
        self._job.output.report(f"{reason}{'; ending the others' if self._job.running else ''}.")
        self._job.supervisor.end(signal.SIGTERM)

    def _take_signals(self) -> bool:
        # Other signals have numbers here, too, if somebody handles them.
        for number in filter(_SIGNALS.__contains__, os.read(self._signals, 64)):
            name = signal.Signals(number).name
            if number in PASSED_SIGNALS:
                self._job.output.report(f"received {name}; passed it on to all processes.")
                self._job.supervisor.send(b"signal %d\n" % number)
                continue
            first = math.isinf(self._patience)
            self._patience = time.monotonic() + (_OUTPUT_SECONDS if first else _LAST_OUTPUT_SECONDS)
            if self._code is None:
                self._code, self._signalled = 128 + number, True
                self._job.output.report(f"received {name}; ending all processes.")
                self._job.supervisor.end(number, grace_of(number))
            elif number == signal.SIGINT:
                self._job.supervisor.send(b"kill\n")
        return True


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """Yield a file with the numbers of the signals that arrive. Signals that are ignored, as under nohup, stay so."""
    with contextlib.ExitStack() as undo:
        reader, writer = os.pipe()
        for end in (reader, writer):
            undo.callback(os.close, end)
            os.set_blocking(end, False)
        undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer, warn_on_full_buffer=False))
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                undo.callback(signal.signal, number, signal.signal(number, lambda *_: None))
        yield reader
