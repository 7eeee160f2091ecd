"""Data that crosses the package's boundaries: frozen, and made of the standard library alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

__all__ = (
    "REDUCE_OP_NAMES",
    "Adasum",
    "Average",
    "Call",
    "Launch",
    "Max",
    "Min",
    "Product",
    "Settings",
    "Sum",
    "World",
)

# Plain integers with Horovod's values (horovod/common/basics.py), so that scripts may store and compare them.
Average, Sum, Adasum, Min, Max, Product = range(6)
REDUCE_OP_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")


@dataclass(frozen=True)
class Launch:
    """Who this process is, and who says so. It says nothing of how the processes talk."""

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Where each number came from: an environment variable or an argument of `init`."""
    init_method: str | None = None
    """Where the processes meet, as in torch.distributed, if it was given."""
    elastic: bool = False
    """Whether the launcher changes the world while it runs: then the numbers are those of its start."""
    restarts: bool = False
    """Whether the launcher ends all processes and starts them anew when one fails or the hosts change."""
    starts_mpi: bool = False
    """Whether MPI joins these processes; starting it elsewhere makes a world of one, or fails."""
    ignored: tuple[str, ...] = ()
    """'NAME=value' of variables that tell of a larger world but did not start this process."""

    def describe(self, name: str) -> str:
        """Return '`value` (from `source`)' for the field `name`."""
        return f"{getattr(self, name)} (from {self.sources.get(name, self.launcher)})"


@dataclass(frozen=True)
class World:
    """The six numbers of Horovod for one process, as the backend confirmed them."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


@dataclass(frozen=True)
class Settings:
    """What the user may set through the environment, read once by `init`."""

    stall_warn_seconds: float = 60.0
    stall_timeout_seconds: float = 600.0
    timeline: str | None = None
    timeline_mark_cycles: bool = False


@dataclass(frozen=True)
class Call:
    """One collective as this rank called it: what must be equal on every member, and where the call stands."""

    kind: str
    arguments: tuple[tuple[str, Any], ...] = ()
    """(name, value) pairs that must be equal on all members; values are built-in types."""
    name: str | None = None
    site: tuple[str, int] = ("?", 0)
    """(file, line) of the user's code; quoted in errors, never compared."""
    extra: int = 0
    """A number which may differ and is told to every member for free, such as the rows of an allgather."""
    payload: bytes = b""
    """Data that travels along, of a length that follows from `arguments`; see agreement.payload_capacity."""
    joinable: bool = False
    """Whether ranks that have joined can take part."""
    under_way: bool = False
    """Whether the data is being sent already, on another line; the others must take part even in an error."""

    @property
    def identity(self) -> tuple[object, ...]:
        """Return what must be equal on all members."""
        return self.kind, self.name, self.arguments

    def __str__(self) -> str:
        shown = [f"{key}={value}" for key, value in self.arguments]
        if self.name is not None:
            shown.append(f"name={self.name!r}")
        return f"{self.kind}({', '.join(shown)})"

    @property
    def where(self) -> str:
        """Return the call site as 'file:line'."""
        return f"{self.site[0]}:{self.site[1]}"
