"""How gradients are laid out to be sent: parameters in flat buckets of one dtype and device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ("Bucket", "Slot", "as_real", "lay_out")

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""DDP's sizes (torch/nn/parallel/distributed.py): a small first bucket starts the network early in backward."""


@dataclass(frozen=True)
class Slot:
    """The place of one parameter's gradient in its bucket, in elements."""

    param: int
    start: int
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the gradient in `flat`, in the parameter's own memory layout; complex numbers as pairs."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, complex numbers as pairs in a last dimension."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@dataclass(frozen=True)
class Bucket:
    """Some parameters whose gradients are sent together.

    Behind the gradients stand two numbers per parameter, summed along with them: for each how many ranks contribute a
    dense gradient, then for each how many a sparse one. So all ranks know which gradients exist without asking.
    """

    slots: tuple[Slot, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device

    @property
    def length(self) -> int:
        """Return the number of elements with the counts behind the gradients."""
        return self.numel + 2 * len(self.slots)


def lay_out(
    params: Sequence[torch.Tensor],
    left_out: set[int],
    groups: Sequence[Sequence[int]] | None,
    cap_mb: float | None = None,
) -> list[Bucket]:
    """Return buckets for `params` (by index) in the order in which backward is expected to fill them: the last first.

    left_out: parameters whose gradients are sparse; they keep their counts but no room. groups: parameters that must
    share a bucket; the others are on their own. cap_mb: how many MiB make a bucket; the first is
    smaller.
    """
    paired = {index for index, param in enumerate(params) if param.is_complex()}
    params = [as_real(param) for param in params]
    cap = BUCKET_BYTES if cap_mb is None else int(cap_mb * 2**20)
    buckets: list[Bucket] = []
    if groups is not None:
        grouped = {index for group in groups for index in group}
        single = [[index] for index in range(len(params)) if index not in grouped]
        for members in [*groups, *single][::-1]:
            for alike in _alike(params, members[::-1]):
                buckets.append(_bucket(params, alike, left_out, paired))
        return buckets
    for alike in _alike(params, range(len(params))[::-1]):
        pending: list[int] = []
        size, limit = 0, min(cap, FIRST_BUCKET_BYTES)
        for index in alike:
            pending.append(index)
            size += params[index].numel() * params[index].element_size()
            if size >= limit:
                buckets.append(_bucket(params, pending, left_out, paired))
                pending, size, limit = [], 0, cap
        if pending:
            buckets.append(_bucket(params, pending, left_out, paired))
    return buckets


def _alike(params: Sequence[torch.Tensor], order: Sequence[int]) -> list[list[int]]:
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for index in order:
        alike[params[index].dtype, params[index].device].append(index)
    return list(alike.values())


def _bucket(
    params: Sequence[torch.Tensor], members: Sequence[int], left_out: set[int], paired: set[int]
) -> Bucket:
    slots, start = [], 0
    for index in members:
        shape, stride = params[index].shape, params[index].stride()
        if index in left_out:
            shape, stride = (torch.Size([0, 2]), (2, 1)) if index in paired else (torch.Size([0]), (1,))
        elif not _is_dense(params[index]):
            stride = torch.empty(shape, device="meta").stride()
        if index in paired:
            start += start % 2  # where complex numbers may begin
        slots.append(Slot(index, start, shape, stride))
        start += shape.numel()
    return Bucket(tuple(slots), start, params[members[0]].dtype, params[members[0]].device)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the numbers of `tensor` fill a stretch of memory without gaps or overlaps."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
