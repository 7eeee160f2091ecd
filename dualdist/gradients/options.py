"""How gradients are combined, as the ranks compare it when a synchronisation is made."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..agreement import kinds
from ..agreement.kinds import Kind
from ..backends.base import Group
from ..collectives.compression import Compression, Compressor
from ..collectives.reduce import Reduction
from ..collectives.wire import reduction_dtype
from ..types import REDUCE_OP_NAMES, Average
from ..world.process_sets import ProcessSet
from .accumulation import Accumulated

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
    owner: Kind = kinds.OPTIMIZER
    """Who combines them, for errors."""

    @functools.cached_property  # each gradient asks
    def needs_no_count(self) -> bool:
        """Whether each backward is combined, and may be again: then versions of gradients are not looked at."""
        return self.passes == 1 and self.reduction.op == Average

    def divides_first(self, dtype: torch.dtype, group: Group) -> bool:
        """Return whether gradients are divided for their average while they are copied, before the sum, as in DDP.

        Only where that rounds nothing, by a power of two and without a cast, and the user has not chosen the factors.
        """
        sent_as_is = self.compression is Compression.none and reduction_dtype(dtype, group) is dtype
        return self.reduction == Reduction(Average) and sent_as_is and group.size.bit_count() == 1

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
