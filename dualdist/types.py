"""Data that crosses the package's boundaries: frozen, and made of the standard library alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = (
    "REDUCE_OP_NAMES",
    "Adasum",
    "Average",
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
