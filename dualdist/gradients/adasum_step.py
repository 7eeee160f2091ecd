"""Adasum of optimizer steps: the ranks combine their steps, not their gradients.

All ranks start with equal weights, and each takes its own optimizer step. Adasum combines the changes of the weights;
the result is added to the weights before the step (horovod/torch/optimizer.py:345, _DistributedAdasumOptimizer).
"""

from __future__ import annotations

from typing import Any

import torch

from ..collectives.allreduce import grouped_allreduce_
from ..collectives.compression import Compressor
from ..collectives.reduction import check_adasum_size
from ..types import Adasum
from ..world.process_sets import ProcessSet, channel_of
from .combiner import Combiner, alive


class AdasumStep(Combiner):
    """Combines the steps of one optimizer.

    Gradients stay local, whatever the number of backward passes. Parameters are read from the optimizer at each step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        compression: type[Compressor] | Compressor,
        process_set: ProcessSet,
    ) -> None:
        check_adasum_size(channel_of(process_set).group.size)
        self._optimizer = optimizer
        self._compression = compression
        self._process_set = process_set
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        alive.add(self)

    def before_step(self) -> None:
        """Save a copy of the weights."""
        self._before = [(param, param.detach().clone()) for param in self.params() if param.requires_grad]

    def params(self) -> list[torch.Tensor]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def after_step(self) -> None:
        """Combine the changes of the weights. Collective."""
        before, self._before = self._before, []
        if not before:  # a subclass's step() called its base's step(), which has combined already
            return
        with torch.no_grad():
            pairs = [self._compression.compress(param - start) for param, start in before]
            combined: Any = grouped_allreduce_(
                [sent for sent, _ in pairs], op=Adasum, process_set=self._process_set
            )
            for (param, start), change, (_, ctx) in zip(before, combined, pairs, strict=True):
                param.copy_(start + self._compression.decompress(change, ctx))

    def check_skippable(self) -> None:
        """Raise AssertionError, as Horovod does: after a step that is not combined, the ranks' weights would differ."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
