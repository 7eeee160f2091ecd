"""The interface through which optimizers and modules combine gradients over the ranks."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..agreement.call import Data, Kind
from ..backends.base import Group
from ..collectives.reduction import Compression, Compressor, Reduction, wire_dtype
from ..types import Average
from ..world import ProcessSet

Named = Sequence[tuple[str, torch.Tensor]]
"""(name, parameter) pairs."""
OPTIMIZER = Kind("DistributedOptimizer", "DISTRIBUTEDOPTIMIZER", Data.NONE)
"""Compares the layout of the gradients when an optimizer is wrapped."""

# How gradients are combined. The ranks compare these options before they send gradients.


@dataclass(frozen=True)
class SyncOptions:
    """How gradients are combined."""

    reduction: Reduction
    compression: type[Compressor] | Compressor
    process_set: ProcessSet
    sparse_as_dense: bool = False
    bucket_cap_mb: float | None = None
    """Size of a bucket in MiB; None: 25, on a CPU 8."""
    groups: Sequence[Sequence[int]] | None = None
    """Indices of the parameters that share a bucket; None: buckets are formed by size."""
    comm_hook: Any = None
    """The CommHook (comm_hooks.py) that combines the gradients instead of an allreduce. `reduction` and `compression`
    then have no effect."""
    optimizer: str | None = None
    """The name of the optimizer's class; None if the wrapper has none."""
    kind: Kind = OPTIMIZER
    """The kind of wrapper that combines gradients, as errors name it."""
    owner: weakref.ref[torch.optim.Optimizer] | None = None
    """The optimizer; None if the wrapper has none."""

    @functools.cached_property
    def can_repeat(self) -> bool:
        """Whether gradients that were combined stay the same when they are combined once more."""
        return self.reduction.op == Average and self.only_casts and self.comm_hook is None

    @functools.cached_property
    def only_casts(self) -> bool:
        """Whether a copy decompresses: it casts. A compressor of the user may do more."""
        return self.compression in (Compression.none, Compression.fp16, Compression.bf16)

    def divides_first(self, dtype: torch.dtype, group: Group) -> bool:
        """Return whether an average divides gradients while they are copied, before the sum, as in DDP.

        Only for gradients that are sent in their own dtype, without factors of the user. For float16 always, because
        the sum could overflow where the average does not; for other dtypes where this is exact, which it is if the
        number of ranks is a power of two.
        """
        sent_as_is = self.compression is Compression.none and wire_dtype(dtype, group) is dtype
        is_safe = dtype is torch.float16 or group.size.bit_count() == 1
        return self.comm_hook is None and self.reduction == Reduction(Average) and sent_as_is and is_safe


alive: weakref.WeakSet[Combiner] = weakref.WeakSet()
"""The combiners that exist. Copy it before a loop: the garbage collector may remove members."""


def combiners_of(params: Sequence[torch.Tensor]) -> list[Combiner]:
    """Return the combiners of some of `params`."""
    own = {id(param) for param in params}

    def found() -> list[Combiner]:
        return [one for one in alive if not one.is_released and any(id(param) in own for param in one.params())]

    if found():
        gc.collect()  # their owners may be garbage
    return found()


class Combiner:
    """Combines what the ranks compute; itself nothing, for a rank outside the process set, which trains alone."""

    kind: Kind = OPTIMIZER
    """The kind of wrapper that it belongs to."""
    is_released = False
    """Whether `release` was called."""
    can_repeat = False
    """Whether what was combined stays the same when it is combined once more."""
    enabled = False
    """Whether backward combines gradients. If not, they accumulate locally."""
    is_in_world = True
    """Whether the other ranks know this object. If not, they learn of it when it first combines gradients."""
    fills = True
    """Whether parameters may get dense zeros as gradients: not if the optimizer takes only sparse ones."""
    passes = 1
    """How many backward passes accumulate before gradients are combined."""
    comm_hook: Any = None
    """As in SyncOptions."""

    def params(self) -> list[torch.Tensor]:
        """Return the parameters."""
        return []

    def add(self, named: Named) -> None:
        """Add parameters. Collective.

        Raises CollectiveMismatchError when names, shapes, dtypes or memory layouts differ between ranks.
        """

    def watch(self, *_: object) -> None:
        """Include parameters whose `requires_grad` has become True, or whose hooks were removed. Local."""

    def shadow(self) -> None:
        """Take part with zeros in one backward of the other ranks; the results become the gradients. Collective."""

    def divide_by(self, number: int | Literal["active"] | None) -> None:
        """Set what averages divide by. Local.

        number: None: the number of ranks; "active": the number of those that have not called `join`.
        """

    def disabled(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients locally in the `with` block. The next backward combines the accumulated gradients."""
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """Combine gradients that backward left uncombined. Collective when there are any."""

    def check(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if a parameter in `param_groups` was never added; see `refuse`."""

    def before_step(self) -> None:
        """Prepare for `step()`, after gradients are combined. Local."""

    def fill_unused(self) -> None:
        """Give zeros to parameters that no rank used, after gradients are combined. Local."""

    def fill(self, kept: Set[int]) -> None:
        """Give zeros to parameters that require a gradient and have none. Local.

        kept: the `id` of parameters that get none.
        """
        for param in self.params() if self.fills else ():
            if param.grad is None and param.requires_grad and id(param) not in kept:
                param.grad = torch.zeros_like(param, dtype=getattr(param, "grad_dtype", None))

    def after_step(self) -> None:
        """Do what remains after `step()`. Collective if the ranks combine steps instead of gradients."""

    def check_skippable(self) -> None:
        """Raise AssertionError when `step()` must not skip the synchronization."""

    def set_passes(self, passes: int) -> None:
        """Set how many backward passes accumulate before gradients are combined, at least 1. Local."""

    def register_comm_hook(self, hook: Any) -> None:
        """Combine gradients by `hook`. Collective. Raises RuntimeError if there is one already."""

    def release(self) -> None:
        """Remove the hooks from the parameters: backward combines no gradients any more. Local."""
        self.is_released = True

    def refuse(self, reason: str) -> None:
        """Raise ValueError with `reason` here, and HorovodInternalError in the next backward of the other ranks.

        Collective, as the synchronization at the end of backward is.
        """
