"""The results of the processes of `spawn`, or the first failure among them."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ProcessEndedError
from . import spawn_child
from .agent import ENDED
from .agent_connection import Event, describe_exit
from .supervisor import Supervisor

__all__ = ("Result", "results_of")

_CHUNK = 1 << 20
_SETTLE_SECONDS = 0.2
"""How long to wait for other failures after one: the first to be reported is not always the first to happen."""
_REAPING_SECONDS = 0.02
"""The reported time of a death may be late by this much. Other ranks may raise meanwhile, because of it."""


class _RankTraceback(Exception):
    """The traceback of a rank, the cause of the exception that `spawn` raises."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


@dataclass(frozen=True)
class _Failure:
    time: float
    rank: int
    error: BaseException
    cause: BaseException | None = None


class Result:
    """The pipe through which one rank sends its message, and the rank's exit. A context manager."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.message: tuple[str, float, Any] | None = None
        """(kind, time, content) from spawn_child.py, None until it is complete."""
        self.exit: Event | None = None
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._data = bytearray()

    def __enter__(self) -> Result:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in (self.reader, self.writer):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def drain(self) -> None:
        """Read everything that is in the pipe."""
        with contextlib.suppress(BlockingIOError):
            while self.message is None and self.read():
                pass

    def read(self) -> bool:
        """Read one chunk. Return whether more may follow."""
        data = os.read(self.reader, _CHUNK)
        self._data += data
        if len(self._data) >= 8 and len(self._data) == 8 + int.from_bytes(self._data[:8], "big"):
            self.message = pickle.loads(self._data[8:])
            return False
        return bool(data)


def results_of(results: Sequence[Result], supervisor: Supervisor, timeout: float | None) -> list[Any]:
    """Wait until all processes have returned, and return what they returned, in rank order.

    Raises the first failure of a rank, and TimeoutError after `timeout` seconds.
    """
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    for result in results:
        supervisor.watch(result.reader, result.read)
    while not all(result.exit for result in results):
        left = deadline - time.monotonic()
        if left <= 0:
            running = [result.rank for result in results if result.exit is None]
            raise TimeoutError(
                f"`spawn` must end within `timeout`={timeout:g} s, but ranks {running} still ran. "
                "They were ended. Give it more time, or look at what they wait for."
            )
        _record(results, supervisor.wait(left))
        if _failures(results):
            _settle(results, supervisor)
            first = min(_failures(results), key=lambda failure: failure.time)
            raise first.error from first.cause
    return [_unpickled(result) for result in results]


def _settle(results: Sequence[Result], supervisor: Supervisor) -> None:
    """Give other ranks a moment to report their failures."""
    settled = time.monotonic() + _SETTLE_SECONDS
    while (left := settled - time.monotonic()) > 0 and not all(result.exit for result in results):
        _record(results, supervisor.wait(left))


def _record(results: Sequence[Result], events: Sequence[Event]) -> None:
    for event in events:
        if event.facts.get("error") or event.kind == ENDED:
            result = results[event.rank]
            result.drain()
            result.exit = event


def _failures(results: Sequence[Result]) -> list[_Failure]:
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


def _died(result: Result, size: int, exit: Event) -> _Failure:
    how = exit.facts.get("error")
    code = exit.facts.get("code")
    if how is None:
        when = "before" if result.message is None else "after"
        how = f"{describe_exit(code or 0)} {when} its function returned"
    moment = exit.facts.get("time", time.monotonic()) - _REAPING_SECONDS
    text = f"Rank {result.rank} of {size} {how}; the others were ended. Look at its output."
    return _Failure(moment, result.rank, ProcessEndedError(text, result.rank, code))


def _unpickled(result: Result) -> Any:
    assert result.message is not None
    return pickle.loads(result.message[2])
