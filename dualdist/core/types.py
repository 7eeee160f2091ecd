"""Immutable data types that several parts of the package share. They import only the standard library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

# Plain integers with Horovod's values (horovod/common/basics.py), so that scripts may store and compare them.
Average = 0
"""`op`: the mean over the ranks. The default of all reductions. Averages of integers truncate toward zero."""
Sum = 1
"""`op`: the sum over the ranks."""
Adasum = 2
"""`op`: Adasum, which adds gradients that are orthogonal and averages those that are parallel. The number of ranks
must be a power of two. Maleki et al. 2020, https://arxiv.org/abs/2006.02924"""
Min = 3
"""`op`: the smallest value over the ranks, for each element."""
Max = 4
"""`op`: the greatest value over the ranks, for each element."""
Product = 5
"""`op`: the product over the ranks."""
REDUCE_OP_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
TORCH_OP_NAMES = ("AVG", "SUM", None, "MIN", "MAX", "PRODUCT")
"""Their names in torch.distributed.ReduceOp, in the same order."""


class TorchOp(Protocol):
    """torch.distributed.ReduceOp.SUM, AVG, MIN, MAX or PRODUCT, for type checkers."""

    @property
    def PREMUL_SUM(self) -> Any: ...


Op = int | TorchOp
"""What users pass as `op`: a constant of Horovod or of torch. `reduce_op` in collectives/reduction.py converts it."""


@dataclass(frozen=True)
class Launch:
    """Rank, size and other facts that the launcher passed to this process. Independent of the backend."""

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The source of each number: an environment variable or an argument of `init`."""
    init_method: str | None = None
    """The URL through which the processes find each other, as in torch.distributed; None if not given."""
    elastic: bool = False
    """Whether the launcher can add or remove processes during the job. Then rank and size are those at its start."""
    restarts: bool = False
    """Whether the launcher restarts all processes if one fails or the hosts change."""
    starts_mpi: bool = False
    """Whether these processes can start MPI together. Under other launchers MPI makes a world of size 1, or fails."""
    starts_horovod: bool = False
    """Whether Horovod itself starts under this launcher: with its MPI controller if `starts_mpi`, else with Gloo."""
    is_part: bool = False
    """Whether the world has only some of the processes that the launcher started, because of `init(comm=)`."""
    by_launcher: bool = True
    """Whether a launcher or the arguments of `init` set the rank and the size; False for plain python."""
    ignored: tuple[str, ...] = ()
    """'NAME=value' of variables that describe a larger world, although no launcher started this process."""

    def describe(self, name: str) -> str:
        """Return '`value` (from `source`)' for the field `name`."""
        return f"{getattr(self, name)} (from {self.sources.get(name, self.launcher)})"


@dataclass(frozen=True)
class World:
    """Horovod's six numbers for one process, confirmed by the backend."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


@dataclass(frozen=True)
class DeviceView:
    """Where a rank runs, and the devices that it sees."""

    host: str
    local_rank: int | None
    """From the launcher; None if it does not say."""
    devices: Sequence[str]
    """A name for each device, in torch's order. The ranks of a host use the same name for a device."""
    numbers: Sequence[str] = field(default_factory=list, kw_only=True)
    """What this process calls the devices. Processes that cgroups confine to one device each call theirs "0"."""


NEVER_SECONDS = 31_536_000
"""A year: the time of a limit that is turned off."""


@dataclass(frozen=True)
class Settings:
    """What the user can set through environment variables. `init` reads them once."""

    stall_warn_seconds: float = 60.0
    """If a collective waits longer, rank 0 logs which ranks are missing."""
    stall_timeout_seconds: float = 600.0
    """If a collective waits longer, it fails."""
    start_timeout_seconds: float = 60.0
    """How long `init` waits for another rank, from the arrival of the first."""
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The environment at `init`, in which each part beside the core finds its own settings."""
