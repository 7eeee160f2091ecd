"""All processes of a job: starting them on every host, waiting for events, and ending them everywhere."""

from __future__ import annotations

import math
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial

from .agent_connection import AgentConnection, Event, HostJob

__all__ = ("Supervisor",)

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
                agent = AgentConnection(host_job)
                self.agents.append(agent)
                assert agent.popen.stdout is not None and agent.popen.stderr is not None
                self.watch(agent.popen.stdout.fileno(), partial(self._read, agent))
                self.watch(agent.popen.stderr.fileno(), agent.read_errors)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._deadline is None:
            self.end(signal.SIGTERM)
        while any(agent.open for agent in self.agents) and self.time_left() > 0:
            self.wait(self.time_left())
        with self._selector:
            for agent in self.agents:
                agent.close(self.time_left())

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
        for agent in self.agents:
            agent.grant()

    def end(self, number: int, grace: float = _GRACE_SECONDS) -> None:
        """Ask all processes to end by signal `number`. Those alive after `grace` seconds are killed."""
        self._deadline = time.monotonic() + grace + _AGENT_SECONDS
        for agent in self.agents:
            agent.end(number, grace)

    def time_left(self) -> float:
        """Return for how many seconds to wait for the end of the processes; infinite before `end`."""
        return math.inf if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def kill(self) -> None:
        """Kill all processes."""
        for agent in self.agents:
            agent.kill()

    def _read(self, agent: AgentConnection) -> bool:
        self._events += agent.read()
        return agent.open
