"""A bucket of gradients as communication hooks see it, with the interface of torch.distributed.GradBucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .buckets import GradientSlot
from .tracked_parameter import TrackedParameter

__all__ = ("GradBucket",)


class GradBucket:
    """The gradients of one bucket. torch's own class has no constructor in Python."""

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        slots: Sequence[GradientSlot],
        params: Sequence[TrackedParameter],
        is_last: bool,
    ) -> None:
        """slots, params: of the gradients in `buffer`, in the same order. Those without elements are left out."""
        self._index = index
        self._buffer = buffer
        self._slots = slots
        self._params = params
        self._is_last = is_last

    def _members(self) -> Iterator[tuple[GradientSlot, torch.Tensor]]:
        for slot, param in zip(self._slots, self._params, strict=True):
            if slot.shape.numel():
                yield slot, param.tensor

    def index(self) -> int:
        """Return the number of the bucket; 0 is the first that is sent."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return all gradients of the bucket, (n,). They are not divided by the number of ranks."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return each gradient, a view of the buffer with the shape of its parameter."""
        return [
            torch.view_as_complex(slot.view(self._buffer)) if param.is_complex() else slot.view(self._buffer)
            for slot, param in self._members()
        ]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of `gradients`."""
        return [param for _, param in self._members()]

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the backward."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the buffer by a tensor of the same shape."""
        self._buffer = buffer
