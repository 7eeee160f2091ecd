"""A collective as one rank calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .call_kinds import Kind

__all__ = ("LONGEST_TEXT", "Call")

LONGEST_TEXT = 400
"""How many characters a message shows of a call or an exception."""


@dataclass(frozen=True)
class Call:
    """One collective as this rank called it."""

    kind: Kind
    arguments: tuple[tuple[str, Any], ...] = ()
    """(name, value) pairs that must be equal on all members; values are built-in types."""
    name: str | None = None
    site: tuple[str, int] = ("?", 0)
    """(file, line) of the user's code; shown in errors, never compared."""
    count: int = 0
    """A number of this rank that all members receive, such as its rows in an allgather; it may differ between them."""
    flag: bool = False
    """A truth value of this rank that all members receive; it may differ between them."""
    payload: bytes = b""
    """Small data sent in the same message as the agreement. Its length follows from `arguments`.

    If the kind has `Data.AFTER`, it is all data of the call: nothing else is sent when all members have sent theirs.
    `payload_capacity` in verdict.py limits it.
    """

    @property
    def identity(self) -> tuple[object, ...]:
        """Return what must be equal on all members."""
        return self.kind.name, self.name, self.arguments

    @property
    def key(self) -> tuple[str, str | None]:
        """Return what matches this call with those of the other members: kind and name."""
        return self.kind.name, self.name

    def __str__(self) -> str:
        shown = [f"{key}={value}" for key, value in self.arguments]
        if self.name is not None:
            shown.append(f"name={self.name!r}")
        return f"{self.kind}({', '.join(shown)})"

    @property
    def brief(self) -> str:
        """Return the call and its site for a message, without most of a long list such as a model's parameters."""
        text = str(self)
        return f"{text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + '...)'} at {self.where}"

    @property
    def where(self) -> str:
        """Return the call site as 'file:line'."""
        return f"{self.site[0]}:{self.site[1]}"
