"""A bucket of gradients as communication hooks see it, with the interface of torch.distributed.GradBucket."""

from __future__ import annotations

from collections.abc import Sequence

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
        pairs = [
            (slot, param.tensor) for slot, param in zip(slots, params, strict=True) if slot.shape.numel()
        ]
        self._slots = [slot for slot, _ in pairs]
        self._params = [param for _, param in pairs]
        self._is_last = is_last

    def index(self) -> int:
        """Return the number of the bucket; 0 is the first that is sent."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return all gradients of the bucket, (n,). They are not divided by the number of ranks."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return each gradient, a view of the buffer with the shape of its parameter."""
        views = [slot.view(self._buffer) for slot in self._slots]
        return [
            torch.view_as_complex(view) if param.is_complex() else view
            for view, param in zip(views, self._params, strict=True)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of `gradients`."""
        return list(self._params)

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the backward."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the buffer by a tensor of the same shape."""
        self._buffer = buffer
