"""A collective as one rank calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .kinds import Kind

__all__ = ("Call",)


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
    """A number that may differ between the members and reaches all of them, such as the rows of an allgather."""
    flag: bool = False
    """A truth value that may differ between the members and reaches all of them."""
    payload: bytes = b""
    """Data sent with the agreement; `arguments` determine its length. See `payload_capacity` in verdict.py."""

    @property
    def identity(self) -> tuple[object, ...]:
        """Return what must be equal on all members."""
        return self.kind.name, self.name, self.arguments

    def __str__(self) -> str:
        shown = [f"{key}={value}" for key, value in self.arguments]
        if self.name is not None:
            shown.append(f"name={self.name!r}")
        return f"{self.kind}({', '.join(shown)})"

    @property
    def where(self) -> str:
        """Return the call site as 'file:line'."""
        return f"{self.site[0]}:{self.site[1]}"
