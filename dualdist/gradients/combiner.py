"""The interface through which optimizers and modules combine gradients over the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from .comm_hook import CommHook

__all__ = ("Combiner", "NullCombiner")


class Combiner:
    """Combines what the ranks compute. A method that a subclass does not override does nothing."""

    enabled = False
    """Whether backward combines gradients. If not, they accumulate locally."""

    is_in_world = True
    """Whether the other ranks know this object. If not, they learn of it when it first combines gradients."""

    passes = 1
    """How many backward passes accumulate before gradients are combined."""

    comm_hook: CommHook | None = None
    """What combines the gradients instead of an allreduce."""

    def add(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Add parameters, as (name, parameter) pairs. Collective.

        Raises CollectiveMismatchError when names, shapes, dtypes or memory layouts differ between ranks.
        """

    def watch(self) -> None:
        """Include parameters whose `requires_grad` has become True. Local."""

    def shadow(self) -> None:
        """Take part with zeros in one backward of the other ranks; the results become the gradients. Collective."""

    def divide_by_active(self, by_active: bool) -> None:
        """Set whether averages divide by the number of ranks that have not called `join`, not by all. Local."""

    def divide_by(self, number: int | None) -> None:
        """Set what averages divide by instead of the number of ranks; None: the number of ranks again. Local."""

    def disabled(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients locally in the `with` block. The next backward combines the accumulated gradients."""
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """Combine gradients that backward left uncombined. Collective when there are any."""

    def check(self, params: Sequence[torch.Tensor]) -> None:
        """Raise ValueError if one of `params` was never added; see `refuse`."""

    def before_step(self) -> None:
        """Prepare for `step()`, after gradients are combined. Local."""

    def after_step(self) -> None:
        """Do what remains after `step()`. Collective if the ranks combine steps instead of gradients."""

    def check_skippable(self) -> None:
        """Raise AssertionError when `step()` must not skip the synchronization."""

    def set_passes(self, passes: int) -> None:
        """Set how many backward passes accumulate before gradients are combined, at least 1. Local."""

    def register_comm_hook(self, hook: CommHook) -> None:
        """Combine gradients by `hook`. Collective. Raises RuntimeError if there is one already."""

    def release(self) -> None:
        """Remove the hooks from the parameters: backward combines no gradients any more. Local."""

    def refuse(self, reason: str) -> None:
        """Raise ValueError with `reason` here, and HorovodInternalError in the next backward of the other ranks.

        Collective, as the synchronization at the end of backward is.
        """


class NullCombiner(Combiner):
    """Combines nothing: for a rank outside the process set, which trains alone."""
