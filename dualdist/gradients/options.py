"""How gradients are combined. The ranks compare these options before they send gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..agreement import call_kinds
from ..agreement.call_kinds import Kind
from ..backends.base import Group
from ..collectives.compression import Compression, Compressor
from ..collectives.reduction import Reduction
from ..collectives.wire import reduction_dtype
from ..types import REDUCE_OP_NAMES, Average
from ..world.process_sets import ProcessSet
from .comm_hook import CommHook
from .tracked_parameter import TrackedParameter


@dataclass(frozen=True)
class SyncOptions:
    """How gradients are combined."""

    reduction: Reduction
    compression: type[Compressor] | Compressor
    process_set: ProcessSet
    sparse_as_dense: bool = False
    bucket_cap_mb: float | None = None
    """Size of a bucket in MiB; None: DDP's sizes."""
    groups: Sequence[Sequence[int]] | None = None
    """Indices of the parameters that share a bucket; None: buckets are formed by size."""
    comm_hook: CommHook | None = None
    """What combines the gradients instead of an allreduce. `reduction` and `compression` then have no effect."""
    optimizer: str | None = None
    """The name of the optimizer's class; None if the wrapper has none."""
    owner: Kind = call_kinds.OPTIMIZER
    """The kind of wrapper that combines gradients, as errors name it."""
    hyperparameters: Callable[[], Mapping[str, object]] = dict
    """Returns numbers of the optimizer that should be equal on all ranks, by name. It must not keep the owner alive."""

    @property
    def can_repeat(self) -> bool:
        """Whether gradients that were combined stay the same when they are combined once more."""
        return self.reduction.op == Average and self.only_casts and self.comm_hook is None

    @property
    def only_casts(self) -> bool:
        """Whether a copy decompresses: it casts. A compressor of the user may do more."""
        return self.compression in (Compression.none, Compression.fp16, Compression.bf16)

    def divides_first(self, dtype: torch.dtype, group: Group) -> bool:
        """Return whether an average divides gradients while they are copied, before the sum, as in DDP.

        Only for gradients that are sent in their own dtype, without factors of the user. For float16 always, because
        the sum could overflow where the average does not; for other dtypes where this is exact, which it is if the
        number of ranks is a power of two.
        """
        sent_as_is = self.compression is Compression.none and reduction_dtype(dtype, group) is dtype
        is_safe = dtype is torch.float16 or group.size.bit_count() == 1
        return self.comm_hook is None and self.reduction == Reduction(Average) and sent_as_is and is_safe

    def describe(self, params: Sequence[TrackedParameter]) -> tuple[tuple[str, Any], ...]:
        """Return (name, value) pairs that must be equal on all ranks, the layout of `params` first."""
        layout = tuple((p.name, tuple(p.shape), p.like.stride(), str(p.dtype), p.device.type) for p in params)
        return (
            ("parameters", layout),
            ("optimizer", self.optimizer),
            ("op", REDUCE_OP_NAMES[self.reduction.op]),
            ("prescale_factor", self.reduction.prescale_factor),
            ("postscale_factor", self.reduction.postscale_factor),
            ("compression", getattr(self.compression, "__name__", type(self.compression).__name__)),
            ("groups", self.groups and tuple(map(tuple, self.groups))),
            ("bucket_cap_mb", self.bucket_cap_mb),
            ("sparse_as_dense", self.sparse_as_dense),
            ("comm_hook", self.comm_hook and self.comm_hook.name),
        )
