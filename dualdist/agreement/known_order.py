"""The order of calls that repeats in each step, see ahead.py."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

from .call import Call

__all__ = ("KnownOrder",)

_LONGEST = 10_000
"""How many calls of a step are remembered. More are made only where no step ends."""


class KnownOrder:
    """The calls that one rank has made since a step ended, and those of earlier steps."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start over: the ranks agree on every call of the next step."""
        self._ended: Hashable = None
        """What ended the last step."""
        self._earlier: dict[Hashable, list[tuple[object, ...]]] = {}
        """What ended a step -> the calls of the last step after it."""
        self._made: list[tuple[object, ...]] = []
        self._count = 0
        self._digest = b""

    def expects(self, call: Call) -> bool:
        """Return whether the last such step made `call` at this place."""
        earlier = self._earlier.get(self._ended, [])
        return self._count < len(earlier) and earlier[self._count] == call.identity

    def add(self, call: Call) -> None:
        """Add `call` to the step."""
        if self._count < _LONGEST:
            self._made.append(call.identity)
        self._count += 1
        self._digest = hashlib.blake2b(self._digest + repr(call.identity).encode(), digest_size=4).digest()

    def describe(self) -> str:
        """Return the number and a digest of the calls of this step, equal on ranks that have made the same.

        "" if there are none.
        """
        if not self._count:
            return ""
        return f"{self._count} calls ({self._digest.hex()})"

    def end_step(self, reason: Hashable) -> None:
        """End the step after the ranks have compared `describe`. reason: equal on all ranks."""
        self._earlier[self._ended] = self._made
        self._earlier.setdefault(reason, self._made)  # most programs have one kind of step
        self._ended = reason
        self._made, self._count, self._digest = [], 0, b""
