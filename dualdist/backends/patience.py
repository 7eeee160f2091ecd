"""How long a collective may take: until the timeout, or until a member is lost.

A rank can give up a collective after a failure and live on. No transport notices this: its Gloo, MPI or Horovod keeps
the connections open, and the others would wait until the timeout. Horovod's Gloo controller has no timeout at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from ..errors import HorovodInternalError, StallError

CHECK_SECONDS = 0.1
"""How often to ask whether a member is lost."""
_SETTLE_SECONDS = 1.0
"""How long a collective may still take when a member is lost. It may have sent all its data, and the transport's own
error is the better one."""


class Patience:
    """The deadlines of one collective."""

    def __init__(self, has_lost_member: Callable[[], bool], timeout: float = math.inf) -> None:
        """timeout: in seconds; infinite if the transport has one of its own."""
        now = time.monotonic()
        self._deadline = now + timeout
        self._ask = has_lost_member
        self._next_check = now + CHECK_SECONDS
        self._lost_since: float | None = None

    def check(self) -> None:
        """Raise StallError after the timeout, and HorovodInternalError when a member is lost."""
        if time.monotonic() > self._deadline:
            raise StallError("A collective did not finish in time.")
        if self.has_lost_member():
            raise HorovodInternalError("a rank has left")

    def has_lost_member(self) -> bool:
        """Return whether a member was lost a while ago."""
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + CHECK_SECONDS
            if self._lost_since is None and self._ask():
                self._lost_since = now
        return self._lost_since is not None and now > self._lost_since + _SETTLE_SECONDS


T = TypeVar("T")


def wait_for(outcome: Future[T], patience: Patience) -> T:
    """Return the result of a step. Raises StallError or HorovodInternalError when `patience` runs out first."""
    while not outcome.done():
        try:
            return outcome.result(CHECK_SECONDS)
        except FutureTimeoutError:
            patience.check()
    return outcome.result()
