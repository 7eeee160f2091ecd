"""The results of the processes of `run` and `spawn`, or the first failure among them."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ProcessEndedError
from . import spawn_child
from .agent import ENDED, RESULT, STARTED, STDERR, STDOUT
from .agent_connection import LOST, AgentConnection, Event, describe_exit
from .output import Output
from .preparation import RunOptions, prepare
from .supervisor import Supervisor

__all__ = ("results_of_job",)

_SETTLE_SECONDS = 0.2
"""How long to wait for other failures after one: the first to be reported is not always the first to happen."""
_REAPING_SECONDS = 0.02
"""The reported time of a death may be late by this much. Other ranks may raise meanwhile, because of it."""


class _RankTraceback(Exception):
    """The traceback of a rank, the cause of the exception that the caller gets."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


@dataclass(frozen=True)
class _Failure:
    time: float
    rank: int
    error: BaseException
    cause: BaseException | None = None


class _Result:
    """The message of one rank from spawn_child.py, and the rank's exit."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.message: tuple[str, float, Any] | None = None
        """(kind, time, content), None until it is complete. time: on this machine's clock time.monotonic()."""
        self.exit: Event | None = None
        self._data = bytearray()

    def add(self, data: bytes, *, from_here: bool) -> None:
        """Add bytes of the message. from_here: whether the rank runs on this machine, so that its clock is ours."""
        self._data += data
        if len(self._data) >= 8 and len(self._data) == 8 + int.from_bytes(self._data[:8], "big"):
            kind, moment, content = pickle.loads(memoryview(self._data)[8:])
            self.message = (kind, moment if from_here else time.monotonic(), content)
            self._data.clear()


def results_of_job(options: RunOptions, timeout: float | None) -> list[Any]:
    """Run a job of spawn_child.py's processes, and return what they returned, in rank order.

    Raises the first failure of a rank, TimeoutError after `timeout` seconds or when a host does not answer, and
    ConfigurationError, before it starts anything, when the options do not fit the hosts.
    """
    with contextlib.ExitStack() as stack:
        host_jobs = stack.enter_context(prepare(options, os.environ))
        size = sum(len(host_job.processes) for host_job in host_jobs)
        output = None
        if options.descriptors is None:
            output = stack.enter_context(Output(size, options.output, timestamps=options.timestamps))
        supervisor = stack.enter_context(Supervisor(host_jobs))
        return _Collection(options, size, output, supervisor).follow(timeout)


class _Collection:
    """Collects the results, and writes the output if it is sent to this process."""

    def __init__(self, options: RunOptions, size: int, output: Output | None, supervisor: Supervisor) -> None:
        self._options = options
        self._results = [_Result(rank) for rank in range(size)]
        self._output = output
        self._supervisor = supervisor
        self._local = {agent.job.host for agent in supervisor.agents if agent.job.local}
        if output is not None:
            supervisor.watch(output.reader, output.empty_reader)

    def follow(self, timeout: float | None) -> list[Any]:
        """Wait until all processes have returned. Raise the first failure."""
        began = time.monotonic()
        start = began + self._options.start_timeout
        deadline = math.inf if timeout is None else began + timeout
        while not all(result.exit for result in self._results):
            silent = [agent for agent in self._supervisor.agents if not agent.greeted]
            left = min(deadline, start if silent else math.inf) - time.monotonic()
            if left <= 0:
                raise self._too_late(silent if time.monotonic() < deadline else [], timeout)
            self._handle(left)
            if _failures(self._results):
                self._settle()
                first = min(_failures(self._results), key=lambda failure: failure.time)
                raise first.error from first.cause
        return [_unpickled(result) for result in self._results]

    def _too_late(self, silent: Sequence[AgentConnection], timeout: float | None) -> TimeoutError:
        if silent:
            names = ", ".join(agent.job.host for agent in silent)
            errors = "; ".join(filter(None, (agent.errors() for agent in silent)))
            return TimeoutError(
                f"Every host must answer within `start_timeout`={self._options.start_timeout:g} s, but {names} did "
                f"not{f': {errors}' if errors else ''}. All processes were ended."
            )
        running = [result.rank for result in self._results if result.exit is None]
        return TimeoutError(
            f"All processes must return within `timeout`={timeout:g} s, but ranks {running} still ran. "
            "They were ended. Give them more time, or look at what they wait for."
        )

    def _settle(self) -> None:
        """Give other ranks a moment to report their failures."""
        settled = time.monotonic() + _SETTLE_SECONDS
        while (left := settled - time.monotonic()) > 0 and not all(result.exit for result in self._results):
            self._handle(left)

    def _handle(self, seconds: float) -> None:
        for event in self._supervisor.wait(seconds):
            result = self._results[event.rank]
            if event.kind == RESULT:
                result.add(event.data, from_here=event.host in self._local)
            elif event.kind in (STDOUT, STDERR) and self._output is not None:
                self._output.write(event.rank, event.kind, event.data)
            elif event.kind in (ENDED, LOST):
                result.exit = event
                if self._output is not None:
                    self._output.close_rank(event.rank)
            elif event.kind == STARTED and self._output is not None and self._options.verbose:
                self._output.report(f"rank {event.rank} on {event.host} is process {event.facts['pid']}.")
        if self._output is not None:
            self._output.check()
        if self._output is None or self._output.has_room():
            self._supervisor.grant()


def _failures(results: Sequence[_Result]) -> list[_Failure]:
    found = []
    for result in results:
        if result.message is not None and result.message[0] == spawn_child.RAISED:
            found.append(_raised(result.rank, len(results), *result.message[1:]))
        elif result.exit is not None and (result.message is None or result.exit.facts.get("code") != 0):
            found.append(_died(result, len(results), result.exit))
    return found


def _raised(rank: int, size: int, moment: float, content: tuple[bytes | None, str]) -> _Failure:
    pickled, text = content
    if pickled is None:
        line = text.strip().splitlines()[-1]
        error: BaseException = ProcessEndedError(f"Rank {rank} raised {line}", rank, None)
    else:
        error = pickle.loads(pickled)
    return _Failure(moment, rank, error, _RankTraceback(f"Rank {rank} of {size}:\n{text}"))


def _died(result: _Result, size: int, exit: Event) -> _Failure:
    how = exit.facts.get("error")
    code = exit.facts.get("code")
    if exit.kind == LOST:
        how = f"is lost with its host {exit.host}: {how}"
    elif how is not None:
        how = f"could not be started: {how}"
    else:
        when = "before" if result.message is None else "after"
        how = f"{describe_exit(code or 0)} {when} its function returned"
    moment = exit.facts.get("time", time.monotonic()) - _REAPING_SECONDS
    text = f"Rank {result.rank} of {size} {how}; the others were ended. Look at its output."
    return _Failure(moment, result.rank, ProcessEndedError(text, result.rank, code))


def _unpickled(result: _Result) -> Any:
    assert result.message is not None
    return pickle.loads(result.message[2])
