"""The layout in which gradients are sent: flat buckets, each of one dtype and device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch

__all__ = ("Bucket", "GradientSlot", "as_real", "lay_out")

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Of gradients, with complex numbers as pairs. Frozen parameters of other dtypes, such as quantized ones, have none."""
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""DDP's sizes (torch/nn/parallel/distributed.py): a small first bucket starts the network early in backward."""
LAST_BUCKET_BYTES = 1 << 20
"""Target size of the last bucket. It is sent when backward has ended: no computation hides its transfer."""


@dataclass(frozen=True)
class GradientSlot:
    """The place of one parameter's gradient in its bucket, in elements."""

    param: int
    start: int
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the gradient in `flat`, in the parameter's own memory layout; see `as_real` for complex numbers."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, with complex numbers as (real, imaginary) pairs in a new last dimension."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@dataclass(frozen=True)
class Bucket:
    """Some parameters whose gradients are sent together."""

    slots: tuple[GradientSlot, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device

    @property
    def length(self) -> int:
        """Return the number of elements that are sent. It is at least 1, because not every backend sends none."""
        return max(1, self.numel)


def lay_out(
    params: Sequence[torch.Tensor],
    sparse: Set[int],
    groups: Sequence[Sequence[int]] | None,
    cap_mb: float | None = None,
    *,
    devices: Sequence[torch.device] | None = None,
    small_last: bool = True,
) -> list[Bucket]:
    """Return buckets for `params` in the order in which backward is expected to fill them: the last parameter first.

    Args:
        params: their shapes, strides and dtypes count; they may be on the device "meta".
        sparse: indices of parameters whose gradients are sparse. A bucket has a slot without elements for each.
        groups: indices of parameters that must share a bucket; each other parameter has its own bucket.
        cap_mb: size of a bucket in MiB; the first bucket, and usually the last, are smaller. None: DDP's sizes.
        devices: of the gradients. None: those of `params`.
        small_last: whether a large last bucket is split, which DDP does not do. `groups` are never split.
    """
    is_complex = [param.is_complex() for param in params]
    params = [as_real(param) for param in params]
    devices = [param.device for param in params] if devices is None else devices
    cap = BUCKET_BYTES if cap_mb is None else int(cap_mb * 2**20)
    buckets: list[Bucket] = []
    if groups is not None:
        grouped = {index for group in groups for index in group}
        single = [[index] for index in range(len(params)) if index not in grouped]
        for members in [*groups, *single][::-1]:
            for same in _by_dtype_and_device(params, devices, members[::-1]):
                buckets.append(_bucket(params, devices, same, sparse, is_complex))
        return buckets
    for same in _by_dtype_and_device(params, devices, range(len(params))[::-1]):
        parts = _by_size(params, same, cap)
        if small_last:
            parts[-1:] = _split_at_end(params, parts[-1])
        buckets += [_bucket(params, devices, part, sparse, is_complex) for part in parts]
    return buckets


def _by_size(params: Sequence[torch.Tensor], members: Sequence[int], cap: int) -> list[list[int]]:
    """Return `members`, in their order, in parts of about `cap` bytes; the first one is smaller."""
    parts: list[list[int]] = []
    pending: list[int] = []
    size, limit = 0, min(cap, FIRST_BUCKET_BYTES)
    for index in members:
        pending.append(index)
        size += params[index].nbytes
        if size >= limit:
            parts.append(pending)
            pending, size, limit = [], 0, cap
    if pending:
        parts.append(pending)
    return parts


def _split_at_end(params: Sequence[torch.Tensor], members: list[int]) -> list[list[int]]:
    """Split off the last parameters: one, or those with at most LAST_BUCKET_BYTES.

    Do not split if the first part would have less than three times LAST_BUCKET_BYTES.
    """
    split, late = len(members) - 1, params[members[-1]].nbytes
    while split and late + (more := params[members[split - 1]].nbytes) <= LAST_BUCKET_BYTES:
        split, late = split - 1, late + more
    early = sum(params[index].nbytes for index in members[:split])
    return [members] if early < 3 * LAST_BUCKET_BYTES else [members[:split], members[split:]]


def _by_dtype_and_device(
    params: Sequence[torch.Tensor], devices: Sequence[torch.device], order: Sequence[int]
) -> list[list[int]]:
    members: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for index in order:
        if params[index].dtype in _DTYPES:
            members[params[index].dtype, devices[index]].append(index)
    return list(members.values())


def _bucket(
    params: Sequence[torch.Tensor],
    devices: Sequence[torch.device],
    members: Sequence[int],
    sparse: Set[int],
    is_complex: Sequence[bool],
) -> Bucket:
    slots, start = [], 0
    for index in members:
        shape, stride = params[index].shape, params[index].stride()
        if index in sparse:
            shape, stride = (torch.Size([0, 2]), (2, 1)) if is_complex[index] else (torch.Size([0]), (1,))
        elif not _is_dense(params[index]):
            stride = torch.empty(shape, device="meta").stride()
        if is_complex[index]:
            start += start % 2  # complex numbers must begin at an even element
        slots.append(GradientSlot(index, start, shape, stride))
        start += shape.numel()
    return Bucket(tuple(slots), start, params[members[0]].dtype, devices[members[0]])


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of `tensor` fill one block of memory without gaps or overlaps."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
