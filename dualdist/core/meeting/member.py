"""A rank in a meeting, from its arrival until its `init()` has ended."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ...errors import ConfigurationError, HorovodInternalError, StallError
from .boards import Board, rising
from .server import (
    FAILED,
    HELLO,
    LOST,
    QUESTION,
    STALLED,
    STARTED,
    TEXT,
    TEXTS,
    not_arrived,
    packed,
    reach,
    take_message,
)

T = TypeVar("T")

_CONNECT_SECONDS = 5.0
_PAUSE_SECONDS = (0.002, 0.1)
"""The first and the longest pause between two attempts to connect to the server."""
_ANSWER_SECONDS = 3.0
"""How long the server may take to answer, also when it asks all ranks for a sign of life."""
_CHECK_SECONDS = 0.05
"""How often a rank looks for messages of the server while it starts."""
_READ_BYTES = 1 << 16


class Meeting:
    """One meeting, as one of its ranks sees it. A context manager.

    The ranks gather texts. Then they connect their backends, while `wait_for` and `check` notice that one of them ends.
    Each closes the meeting when its `init()` has ended.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        size: int,
        timeout: float,
        on_error: Callable[[str, bool], object] | None = None,
    ) -> None:
        """Start the server on rank 0, unless the launcher runs it. Local.

        timeout: seconds to wait for the other ranks in each gather. on_error: called with (text, whether this rank
        reports the error) when ranks do not arrive. The rank that reports the error calls it first, before any rank
        raises. What it prints is printed before the launcher sees that a process has failed, and ends the others.
        """
        self.rank, self.size = rank, size
        self._board, self._timeout, self._on_error = board, timeout, on_error
        self._server = board.serve(size) if rank == 0 else None
        self._socket: socket.socket | None = None
        self._unread = bytearray()
        self._has_begun = False
        """Whether all ranks have arrived."""
        self._lost: int | None = None
        """A rank that has ended before it has started, is stopped, or whose `init()` has failed."""

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.close(started=error is None)

    def gather(self, text: str) -> list[str]:
        """Return every rank's `text`, in rank order. Collective over the job.

        Raises ConfigurationError on all ranks that have arrived, with the names of those that do not within the
        timeout of one of them. Raises HorovodInternalError if a rank ends after all have arrived.
        """
        deadline = time.monotonic() + self._timeout
        pauses = rising(*_PAUSE_SECONDS)
        while True:
            problem = ""
            left = max(0.0, deadline - time.monotonic())
            try:
                if self._socket is not None or self._connect(left):
                    self._send(TEXT, text, left, self._timeout, self._board.advice)
                    return self._gathered(left)
            except OSError as error:
                # An earlier start has left the address there, or the server refuses a second process of this rank.
                problem = str(error)
                self._disconnect()
                if self._has_begun:
                    self._lost = 0
                    self.check()
            if time.monotonic() >= deadline:
                raise ConfigurationError(self._unreachable(problem))
            time.sleep(next(pauses))

    def wait_for(self, step: Future[T], seconds: float | None = None) -> T:
        """Return the result of `step`, in which another thread connects this rank to the others.

        seconds: how long the step may take. None: it has a timeout itself.

        Raises HorovodInternalError if a rank has ended or is stopped, and names it; StallError after `seconds`. The
        thread is abandoned then: it ends at its own timeout.
        """
        deadline = time.monotonic() + (math.inf if seconds is None else seconds)
        while not step.done():
            self.check()
            if time.monotonic() > deadline:
                late = StallError(
                    f"Rank {self.rank} could not connect to the other ranks in {seconds:g} s. Look at their output."
                )
                self.check(late)
                raise late
            concurrent.futures.wait([step], _CHECK_SECONDS)
        cause = step.exception()
        if isinstance(cause, (OSError, RuntimeError)):
            self.check(cause)
        if isinstance(cause, RuntimeError) and not isinstance(cause, HorovodInternalError):
            text = str(cause).partition("\n")[0]
            raise HorovodInternalError(
                f"Rank {self.rank} could not connect to the other ranks: {text}. Look at their output."
            ) from cause
        return step.result()

    def check(self, cause: BaseException | None = None) -> None:
        """Raise HorovodInternalError, because of `cause`, if a rank has ended.

        cause: an error of this rank that may be the consequence of an end. If given, wait for a sign of life of all.
        """
        if cause is not None:
            self._send(STALLED)
        deadline = time.monotonic() + (0 if cause is None else _ANSWER_SECONDS)
        while self._lost is None and self._socket is not None:
            try:
                message = self._receive(max(0.0, deadline - time.monotonic()))
            except OSError:
                message = [LOST, 0]
            if message is None and cause is not None:  # the server does not answer
                message = [LOST, 0]
            if message is None or message[0] == STALLED:
                break
            if message[0] == QUESTION:
                self._send(QUESTION)
            elif message[0] == LOST:
                self._lost = message[1]
            elif message[0] == STARTED:
                self._disconnect()
        if self._lost is not None:
            raise HorovodInternalError(
                f"Rank {self.rank} could not connect to the other ranks: rank {self._lost} has ended, is stopped, or "
                "its start has failed. Look at its output."
            ) from cause

    def close(self, *, started: bool) -> None:
        """Leave the meeting. Safe to call twice. started: whether this rank has started; if not, the others raise."""
        if started:
            self._send(STARTED)
        self._disconnect()
        server, self._server = self._server, None
        if server is not None:
            if not self._has_begun:
                self._board.clear()
            server.close(*([STARTED] if started else [LOST, self.rank]))

    def _connect(self, seconds: float) -> bool:
        """Try once to connect to the server. Return whether its place is known. Raises OSError."""
        place = self._board.find(seconds)
        if place is None:
            return False
        try:
            endpoints = [(host, port) for host in place.hosts for port in place.ports]
            self._socket = reach(endpoints, place.secret, _CONNECT_SECONDS)
        except OSError as error:
            if not self._board.is_launchers:  # else it must be there
                raise
            raise ConfigurationError(self._unreachable(str(error))) from error
        self._send(HELLO, self.rank, self.size)
        return True

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._unread.clear()

    def _gathered(self, seconds: float) -> list[str]:
        """Return the texts of all ranks. Raises OSError when the server is gone."""
        message = self._receive(seconds + _ANSWER_SECONDS)
        if message is None:  # the server is rank 0's, and stopped
            raise ConfigurationError(not_arrived(self.rank, [0], self._timeout, self._board.advice))
        kind, *content = message
        if kind == FAILED:
            error, is_own = content
            if self._on_error is not None:
                self._on_error(error, is_own)
            if is_own:
                self._send(FAILED)
                self._receive(_ANSWER_SECONDS)  # the others have it now
            raise ConfigurationError(error)
        if kind == LOST and self._has_begun:
            self._lost = content[0]
            self.check()
        if kind != TEXTS:
            raise ConnectionError("the server has closed")
        if self._server is not None and not self._has_begun:
            self._board.clear()
        self._has_begun = True
        return list(content[0])

    def _unreachable(self, problem: str) -> str:
        if not problem:
            return not_arrived(self.rank, [0], self._timeout, self._board.advice)
        return (
            f"Rank {self.rank} of {self.size} could not reach the server of the job, which rank 0 or the launcher "
            f"runs, at {self._board.where}: {problem}. {self._board.fix}"
        )

    def _receive(self, seconds: float) -> list[Any] | None:
        """Return the next message of the server, None after `seconds`. Raises OSError when the server has closed."""
        assert self._socket is not None
        deadline = time.monotonic() + seconds
        while (message := take_message(self._unread)) is None:
            self._socket.settimeout(max(1e-6, deadline - time.monotonic()))
            try:
                part = self._socket.recv(_READ_BYTES)
            except TimeoutError:
                return None
            if not part:
                raise ConnectionError("the server has closed the connection")
            self._unread += part
        return message

    def _send(self, *message: Any) -> None:
        # If the connection is lost, reading from it shows so.
        with contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.settimeout(_ANSWER_SECONDS)
                self._socket.sendall(packed(*message))
