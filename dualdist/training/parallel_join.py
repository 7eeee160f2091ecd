"""Training with different numbers of batches on the ranks, behind DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..backends.torch_interface import join_hook
from ..checks import flag
from ..collectives.allreduce import allreduce
from ..collectives.join import join
from ..gradients.combiner import Combiner
from ..types import Max, Sum
from ..world.process_sets import ProcessSet
from ..world.ranks import rank, size

__all__ = ("JoinedTraining",)


class JoinedTraining:
    """What a wrapper does in the block of `join`, and after it."""

    def __init__(self, combiner: Combiner, *, divides_by_active: bool = False, throws: bool = False) -> None:
        """Start the block. throws: whether every rank raises as soon as one has no more data."""
        self._combiner = combiner
        self._throws = throws
        combiner.divide_by_active(divides_by_active)

    def before_forward(self) -> None:
        """Raise RuntimeError if another rank has no more data and `throws` is set; that is collective."""
        if self._throws and self._count_active(True) < size():
            self._throw()

    def end(self) -> int:
        """Take part for the others until all have left the block. Return the rank that left last. Collective."""
        if self._throws and self._count_active(False):
            self._throw()
        return join()

    def torch_hook(
        self, overwrite: Callable[[int], None], process_set: ProcessSet, kwargs: Mapping[str, Any]
    ) -> Any:
        """Return a JoinHook of torch.

        overwrite: copies parameters and buffers of a rank to all others in `process_set`. kwargs: those of Join.
        """
        if not flag("divide_by_initial_world_size", kwargs.get("divide_by_initial_world_size", True)):
            raise ValueError(
                "`divide_by_initial_world_size` must be True in torch's Join, but is False instead. Use the method "
                "join() of the module for that."
            )

        def end(is_last: bool) -> None:
            candidate = torch.tensor([rank() if is_last else -1])
            overwrite(int(allreduce(candidate, op=Max, name="join.last", process_set=process_set)))

        return join_hook(self._combiner.shadow, end)

    def _count_active(self, is_active: bool) -> int:
        return int(allreduce(torch.tensor([int(is_active)]), op=Sum, name="join.active"))

    def _throw(self) -> None:
        raise RuntimeError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")
