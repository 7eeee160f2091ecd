"""One job of `dualdist run`: the processes on all hosts, their output, and how they end.

When a process fails, all others are ended, and its exit code is that of the job. A signal to the launcher is passed on
to all processes; a second one kills them. All this works even while nobody reads the output.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence

from .agent import ENDED, STARTED, STDERR, STDOUT
from .agent_connection import LOST, AgentConnection, Event, Supervisor, describe_exit
from .output import Output
from .starters import RunOptions, prepare

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OUTPUT_SECONDS, _LAST_OUTPUT_SECONDS = 4.0, 1.0
"""How long the launcher waits for its output to be read after the first signal, and after a later one."""


def run_job(options: RunOptions, env: Mapping[str, str]) -> int:
    """Run the job to its end and return its exit code. env: the environment of this process.

    Must be called in the main thread, because it handles signals. Raises ConfigurationError, before it starts anything,
    when the options do not fit the hosts.
    """
    with prepare(options, env) as host_jobs:
        size = sum(len(host_job.processes) for host_job in host_jobs)
        with (
            _signals() as received,
            Output(size, options.output, timestamps=options.timestamps) as output,
            Supervisor(host_jobs) as supervisor,
        ):
            return _Job(options, size, output, supervisor, received).follow()


class _Job:
    """Follows the processes until they have ended."""

    def __init__(
        self, options: RunOptions, size: int, output: Output, supervisor: Supervisor, signals: _Signals
    ) -> None:
        self._options = options
        self._running = set(range(size))
        self._output = output
        self._supervisor = supervisor
        self._signals = signals
        self._code: int | None = None
        """The exit code of the job, None until something ends it."""
        self._patience = math.inf
        """Until when to wait for the output to be read, on the clock time.monotonic()."""

    def follow(self) -> int:
        """Wait until all processes have ended and their output is written; return the exit code."""
        self._supervisor.watch(self._signals.reader, self._take_signals)
        self._supervisor.watch(self._output.reader, self._output.empty_reader)
        start = time.monotonic() + self._options.start_timeout
        while self._running and self._supervisor.time_left() > 0:
            silent = [agent for agent in self._supervisor.agents if not agent.greeted]
            limit = start - time.monotonic() if silent and self._code is None else math.inf
            if limit <= 0:
                self._give_up(silent)
                continue
            for event in self._supervisor.wait(min(limit, self._supervisor.time_left())):
                self._handle(event)
            self._output.check()
            if self._output.has_room():
                self._supervisor.grant()
        self._finish_output()
        return self._code or 0

    def _finish_output(self) -> None:
        """Wait until the output is written. After a signal, only for a short time."""
        self._output.end_lines()
        self._patience = max(self._patience, time.monotonic() + _LAST_OUTPUT_SECONDS)
        while self._output.unwritten() and (left := self._patience - time.monotonic()) > 0:
            self._supervisor.wait(left)
            self._output.check()

    def _give_up(self, silent: Sequence[AgentConnection]) -> None:
        names = ", ".join(agent.job.host for agent in silent)
        errors = "; ".join(filter(None, (agent.errors() for agent in silent)))
        seconds = f"{self._options.start_timeout:g} s (see --start-timeout)"
        self._fail(1, f"{names} did not answer within {seconds}{f': {errors}' if errors else ''}")

    def _handle(self, event: Event) -> None:
        if event.kind in (STDOUT, STDERR):
            self._output.write(event.rank, event.kind, event.data)
        elif event.kind == STARTED:
            self._report_start(event)
        else:
            self._running.discard(event.rank)
            self._output.close_rank(event.rank)
            self._handle_end(event)

    def _handle_end(self, event: Event) -> None:
        who, error = f"rank {event.rank} on {event.host}", event.facts["error"]
        if event.kind == LOST:
            self._fail(255, f"{event.host}, with rank {event.rank}, is lost: {error}")
            return
        assert event.kind == ENDED
        code = int(event.facts["code"])
        if error is not None:
            self._fail(code, f"{who} could not be started: {error}")
        elif code != 0:
            self._fail(code if code > 0 else 128 - code, f"{who} {describe_exit(code)}")

    def _fail(self, code: int, reason: str) -> None:
        """End the job with exit code `code`, unless it is already ending."""
        if self._code is not None:
            return
        self._code = code
        self._output.report(f"{reason}{'; ending the others' if len(self._running) > 0 else ''}.")
        self._supervisor.end(signal.SIGTERM)

    def _take_signals(self) -> bool:
        for number in self._signals.take():
            first = math.isinf(self._patience)
            self._patience = time.monotonic() + (_OUTPUT_SECONDS if first else _LAST_OUTPUT_SECONDS)
            if self._code is None:
                self._code = 128 + number
                self._output.report(f"received {signal.Signals(number).name}; ending all processes.")
                self._supervisor.end(number)
            else:
                self._supervisor.kill()
        return True

    def _report_start(self, event: Event) -> None:
        if self._options.verbose:
            threads = event.facts["threads"]
            chosen = "" if threads is None else f", with OMP_NUM_THREADS={threads} because it was not set"
            self._output.report(f"rank {event.rank} on {event.host} is process {event.facts['pid']}{chosen}.")


class _Signals:
    """The signals that have arrived. The file `reader` is readable while there are some."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        for end in (self.reader, self._writer):
            os.set_blocking(end, False)

    def add(self, number: int, _: object) -> None:
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
    """Collect the signals that end a job, except those that this process ignores, as under nohup."""
    received = _Signals()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, received.add)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        received.close()
