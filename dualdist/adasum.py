"""Adasum: a sum that adds orthogonal gradients and averages parallel ones.

adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b, applied along a binary tree over the ranks
(Maleki et al. 2020, arXiv:2006.02924, equation 7 and section 4.2; horovod/common/ops/adasum/adasum.h:194). The tree
combines ranks at distances 1, 2, 4, ..., so the number of ranks must be a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .core.backends.base import Group


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
