"""What DistributedOptimizer does for Adasum: it combines the steps of the ranks, not their gradients.

Each rank steps by itself from the same weights; the differences are combined by Adasum and added to the weights
(horovod/torch/optimizer.py:345, _DistributedAdasumOptimizer).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..collectives.adasum import check_adasum_size
from ..collectives.allreduce import grouped_allreduce_
from ..collectives.compression import Compressor
from ..types import Adasum
from ..world.process_sets import ProcessSet, channel_of

__all__ = ("AdasumStep",)


class AdasumStep:
    """Combines the steps of one optimizer. Has the methods of GradSync that DistributedOptimizer calls."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        compression: type[Compressor],
        passes: int,
        process_set: ProcessSet,
    ) -> None:
        check_adasum_size(channel_of(process_set).group.size)
        self._optimizer = optimizer
        self._compression = compression
        self._process_set = process_set
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def finish(self) -> None:
        """Gradients stay local."""

    def fill(self) -> None:
        """Remember the weights before the step."""
        params = [
            param
            for group in self._optimizer.param_groups
            for param in group["params"]
            if param.requires_grad
        ]
        self._before = [(param, param.detach().clone()) for param in params]

    def stepped(self) -> None:
        """Combine what the step changed. Collective."""
        before, self._before = self._before, []
        if not before:  # a subclass's step() that calls its base's: the inner one has combined
            return
        with torch.no_grad():
            pairs = [self._compression.compress(param - start) for param, start in before]
            combined: Any = grouped_allreduce_(
                [sent for sent, _ in pairs], op=Adasum, process_set=self._process_set
            )
            for (param, start), change, (_, ctx) in zip(before, combined, pairs, strict=True):
                param.copy_(start + self._compression.decompress(change, ctx))

    def check_skippable(self) -> None:
        """Raise AssertionError, as Horovod does: a step without its combination would part the ranks."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def set_passes(self, passes: int) -> None:
        """Local steps are taken whenever step() is called; nothing to set."""

    def add(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Parameters are read from the optimizer at every step; nothing to add."""
