"""One job of `dualdist run`: the processes on all hosts, their output, and how it ends.

The first process that fails ends the others, and its exit code is the job's. A signal to this process goes on to all
of them; a second one kills them.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from ..launch.environment import exportable, process_variables, without_launchers
from ..rendezvous.keyvalue import KeyValueServer
from .agent import ENDED, STARTED, STDERR, STDOUT
from .hosts import Host, Slot, assign
from .output import Output
from .remote import address_towards, is_local, ssh_command
from .supervisor import BOOTSTRAP, LOST, Crew, Event, Process, Shim, Spec, ending

__all__ = ("RunOptions", "run_job")

_LOOPBACK = "127.0.0.1"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class RunOptions:
    """What `dualdist run` was asked for."""

    command: Sequence[str]
    hosts: Sequence[Host]
    size: int | None = None
    """None: all slots of the hosts."""
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """To set for the processes, whatever the environment has."""
    output: Path | None = None
    timestamps: bool = False
    interface: str | None = None
    ssh_port: int | None = None
    ssh_identity: str | None = None
    start_timeout: float = 30.0
    """Seconds for every host to answer."""
    verbose: bool = False


def run_job(options: RunOptions, env: Mapping[str, str]) -> int:
    """Run the job to its end and return its exit code. env: the environment of this process.

    Must be called in the main thread, since it takes the signals. Raises ConfigurationError when the job cannot be
    laid out, before anything starts.
    """
    slots = assign(options.hosts, options.size)
    names = list(dict.fromkeys(slot.host for slot in slots))
    remote = [name for name in names if not is_local(name)]
    address = _LOOPBACK
    if remote:
        address = address_towards(remote[0], env, options.interface)
    secret = secrets.token_bytes(32)
    with (
        KeyValueServer(address, secret=secret) as server,
        Output(len(slots), options.output, timestamps=options.timestamps) as output,
        _signals() as received,
        Crew(_specs(options, slots, remote, f"{server.host}:{server.port}", secret, env)) as crew,
    ):
        return _Job(options, len(slots), output, crew, received).follow()


def _specs(
    options: RunOptions,
    slots: Sequence[Slot],
    remote: Sequence[str],
    rendezvous: str,
    secret: bytes,
    env: Mapping[str, str],
) -> list[Spec]:
    ours = {"PYTHONUNBUFFERED": "1"} | without_launchers(env)  # else lines come late, as horovodrun found
    specs = []
    for host in dict.fromkeys(slot.host for slot in slots):
        processes = [
            Process(
                slot.rank,
                options.command,
                process_variables(
                    "dualdist run",
                    slot.rank,
                    len(slots),
                    slot.local_rank,
                    slot.local_size,
                    rendezvous,
                    secret,
                ),
            )
            for slot in slots
            if slot.host == host
        ]
        command: Sequence[str] = BOOTSTRAP
        if host in remote:
            command = ssh_command(
                host,
                BOOTSTRAP,
                env,
                port=options.ssh_port,
                identity=options.ssh_identity,
                timeout=max(1, int(options.start_timeout) - 1),
            )
        kept = exportable(ours) if host in remote else ours
        specs.append(Spec(host, command, processes, kept | dict(options.variables), host not in remote))
    return specs


class _Job:
    def __init__(self, options: RunOptions, size: int, output: Output, crew: Crew, signals: _Signals) -> None:
        self._options = options
        self._left = set(range(size))
        self._output = output
        self._crew = crew
        self._signals = signals
        self._code: int | None = None
        """The exit code, once there is a reason to end."""

    def follow(self) -> int:
        self._crew.watch(self._signals.reader, self._take_signals)
        start = time.monotonic() + self._options.start_timeout
        while self._left and self._crew.patience() > 0:
            silent = [shim for shim in self._crew.shims if not shim.greeted]
            limit = start - time.monotonic() if silent and self._code is None else math.inf
            if limit <= 0:
                self._give_up(silent)
                continue
            for event in self._crew.wait(min(limit, self._crew.patience())):
                self._note(event)
        return self._code or 0

    def _give_up(self, silent: Sequence[Shim]) -> None:
        names = ", ".join(shim.spec.host for shim in silent)
        words = "; ".join(filter(None, (shim.said() for shim in silent)))
        seconds = f"{self._options.start_timeout:g} s (see --start-timeout)"
        self._fail(1, f"{names} did not answer within {seconds}{f': {words}' if words else ''}")

    def _note(self, event: Event) -> None:
        if event.kind in (STDOUT, STDERR):
            self._output.write(event.rank, event.kind, event.data)
        elif event.kind == STARTED:
            self._tell_of_start(event)
        else:
            self._left.discard(event.rank)
            self._output.close_rank(event.rank)
            self._judge(event)

    def _judge(self, event: Event) -> None:
        who, error = f"rank {event.rank} on {event.host}", event.fact["error"]
        if event.kind == LOST:
            self._fail(255, f"{event.host}, with rank {event.rank}, is lost: {error}")
            return
        assert event.kind == ENDED
        code = int(event.fact["code"])
        if error is not None:
            self._fail(code, f"{who} could not be started: {error}")
        elif code != 0:
            self._fail(code if code > 0 else 128 - code, f"{who} {ending(code)}")

    def _fail(self, code: int, reason: str) -> None:
        """End the job, if nothing has ended it before."""
        if self._code is not None:
            return
        self._code = code
        _say(f"{reason}{'; ending the others' if len(self._left) > 0 else ''}.")
        self._crew.end(signal.SIGTERM)

    def _take_signals(self) -> bool:
        for number in self._signals.take():
            if self._code is None:
                self._code = 128 + number
                _say(f"received {signal.Signals(number).name}; ending all processes.")
                self._crew.end(number)
            else:
                self._crew.kill()
        return True

    def _tell_of_start(self, event: Event) -> None:
        if self._options.verbose:
            threads = event.fact["threads"]
            chosen = "" if threads is None else f", OMP_NUM_THREADS={threads} as it was unset"
            _say(f"rank {event.rank} on {event.host} is process {event.fact['pid']}{chosen}.")


class _Signals:
    """The signals that have come, behind a file that is readable once there are some."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        for end in (self.reader, self._writer):
            os.set_blocking(end, False)

    def note(self, number: int, _: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, bytes([number]))

    def take(self) -> list[int]:
        with contextlib.suppress(BlockingIOError):
            return list(os.read(self.reader, 64))
        return []

    def close(self) -> None:
        os.close(self.reader)
        os.close(self._writer)


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    """Take the signals that end a job, but for those that whoever started us ignores, such as nohup."""
    received = _Signals()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, received.note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        received.close()


def _say(text: str) -> None:
    sys.stderr.write(f"dualdist run: {text}\n")
    sys.stderr.flush()
