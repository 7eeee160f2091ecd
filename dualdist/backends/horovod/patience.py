"""How long an operation of Horovod may take: until the timeout, or until a member is lost.

Horovod's Gloo controller never detects a missing rank. When a rank gives up its collective after a failure, its Horovod
continues to answer the others', and these wait for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ...errors import HorovodInternalError, StallError

__all__ = ("Patience",)

_CHECK_SECONDS = 0.1
"""How often to ask whether a member is lost."""
_SETTLE_SECONDS = 1.0
"""How long an operation may still take when a member is lost. It may have sent all its data, and Horovod's own error is
the better one."""


class Patience:
    """The deadlines of one operation."""

    def __init__(self, timeout: float, has_lost_member: Callable[[], bool]) -> None:
        """timeout: in seconds."""
        now = time.monotonic()
        self._deadline = now + timeout
        self._has_lost_member = has_lost_member
        self._next_check = now + _CHECK_SECONDS
        self._lost_since: float | None = None

    def check(self) -> None:
        """Raise StallError after the timeout, and HorovodInternalError when a member is lost."""
        now = time.monotonic()
        if now > self._deadline:
            raise StallError("A collective did not finish in time.")
        if now < self._next_check:
            return
        self._next_check = now + _CHECK_SECONDS
        if self._lost_since is None and self._has_lost_member():
            self._lost_since = now
        if self._lost_since is not None and now > self._lost_since + _SETTLE_SECONDS:
            raise HorovodInternalError("a rank has left")
