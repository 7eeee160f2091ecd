"""How gradients are combined, as the ranks compare it when a synchronisation is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .accumulation import Accumulated
from .collectives.reduce import Reduction
from .compression import Compressor
from .process_sets import ProcessSet
from .types import REDUCE_OP_NAMES, Average

__all__ = ("SyncOptions",)


@dataclass(frozen=True)
class SyncOptions:
    """How gradients are combined."""

    reduction: Reduction
    compression: type[Compressor]
    passes: int
    process_set: ProcessSet
    sparse_as_dense: bool = False
    bucket_cap_mb: float | None = None
    """How many MiB are sent at once; None: as in DDP."""
    owner: str = "DistributedOptimizer"
    """Who combines them, for errors."""

    @property
    def needs_no_count(self) -> bool:
        """Whether it is all the same how many backwards have added to a gradient: each is combined, again and again."""
        return self.passes == 1 and self.reduction.op == Average

    def describe(
        self, params: Sequence[Accumulated], groups: Sequence[Sequence[int]] | None
    ) -> tuple[tuple[str, Any], ...]:
        """Return by name what must be equal on all ranks for `params` in `groups`, the layout of gradients first."""
        layout = tuple(
            (p.name, tuple(p.tensor.shape), p.tensor.stride(), str(p.tensor.dtype), p.tensor.device.type)
            for p in params
        )
        return (
            ("parameters", layout),
            ("op", REDUCE_OP_NAMES[self.reduction.op]),
            ("prescale_factor", self.reduction.prescale_factor),
            ("postscale_factor", self.reduction.postscale_factor),
            ("compression", self.compression.__name__),
            ("groups", groups and tuple(map(tuple, groups))),
            ("bucket_cap_mb", self.bucket_cap_mb),
            ("sparse_as_dense", self.sparse_as_dense),
        )
