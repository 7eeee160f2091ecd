"""Adasum: a sum that adds orthogonal gradients and averages parallel ones.

adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b, applied along a binary tree over the ranks
(Maleki et al. 2020, arXiv:2006.02924, equation 7 and section 4.2; horovod/common/ops/adasum/adasum.h:194). The tree
combines ranks at distances 1, 2, 4, ..., so the number of ranks must be a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .core.backends.base import Group
from .core.collectives.allreduce import grouped_allreduce_
from .core.collectives.reduction import Compressor
from .core.gradients.combiner import Combiner, alive
from .core.types import Adasum
from .core.world import ProcessSet, channel_of


def check_size(size: int) -> None:
    """Raise NotImplementedError, as Horovod does, unless `size` is a power of two."""
    if size & (size - 1):
        raise NotImplementedError(
            f"Adasum must run on 1, 2, 4, 8, ... ranks (a power of two), but has {size} instead. "
            "Use Average, or another number of ranks."
        )


def combine(group: Group, tensors: Sequence[torch.Tensor]) -> None:
    """Combine each of `tensors` (1-D views of one flat buffer) in place over all ranks of `group`."""
    whole = torch.cat(list(tensors))
    sizes = [tensor.numel() for tensor in tensors]
    distance = 1
    while distance < group.size:
        theirs = _swap(group, whole, group.rank ^ distance)
        lower_first = (whole, theirs) if group.rank & distance == 0 else (theirs, whole)
        pairs = zip(*(side.split(sizes) for side in lower_first), strict=True)
        whole = torch.cat([_combine(a, b) for a, b in pairs])
        distance *= 2
    for tensor, part in zip(tensors, whole.split(sizes), strict=True):
        tensor.copy_(part)


def _swap(group: Group, tensor: torch.Tensor, partner: int) -> torch.Tensor:
    data = tensor.view(torch.uint8)
    counts = [0] * group.size
    counts[partner] = data.numel()
    received = torch.empty_like(data)
    group.alltoall(received, data, counts, counts).wait()
    return received.view(tensor.dtype)


def _combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    wide_a, wide_b = a.double(), b.double()
    dot, square_a, square_b = wide_a @ wide_b, wide_a @ wide_a, wide_b @ wide_b
    # If one vector is zero, the result is the other one.
    keep_a = torch.where(square_a > 0, 1 - dot / (2 * square_a), torch.ones_like(dot))
    keep_b = torch.where(square_b > 0, 1 - dot / (2 * square_b), torch.ones_like(dot))
    return (keep_a * wide_a + keep_b * wide_b).to(a.dtype)


# Adasum of optimizer steps: the ranks combine their steps, not their gradients.
#
# All ranks start with equal weights, and each takes its own optimizer step. Adasum combines the changes of the weights;
# the result is added to the weights before the step (horovod/torch/optimizer.py:345, _DistributedAdasumOptimizer).


class AdasumStep(Combiner):
    """Combines the steps of one optimizer.

    Gradients stay local, whatever the number of backward passes. Parameters are read from the optimizer at each step.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, compression: type[Compressor] | Compressor, process_set: ProcessSet
    ) -> None:
        check_size(channel_of(process_set).group.size)
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
            combined: Any = grouped_allreduce_([sent for sent, _ in pairs], op=Adasum, process_set=self._process_set)
            for (param, start), change, (_, ctx) in zip(before, combined, pairs, strict=True):
                param.copy_(start + self._compression.decompress(change, ctx))

    def check_skippable(self) -> None:
        """Raise AssertionError, as Horovod does: after a step that is not combined, the ranks' weights would differ."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
