"""Where the gradients of a bucket are summed: a flat tensor, and views of it that become the gradients."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from .accumulation import Accumulated
from .buckets import Bucket, as_real
from .collectives.reduce import scale_

__all__ = ("BucketMemory",)


def _references_in_a_loop() -> int:
    """Return how many references there are to what only a list holds, seen from a loop over it."""
    for _, only in enumerate([object()]):
        return sys.getrefcount(only)
    raise AssertionError


_references_to_a_view = _references_in_a_loop()

LARGE_BYTES = 1 << 20
"""What a gradient has on the average where scaling each while it is copied is faster than scaling all in the cache."""


class BucketMemory:
    """The memory of one bucket. `params` and `grads` are in the order of its slots."""

    def __init__(self, bucket: Bucket, params: Sequence[Accumulated]) -> None:
        self._params = params
        self.flat = torch.zeros(bucket.length, dtype=bucket.dtype, device=bucket.device)
        # .data: a version counter for each; see Accumulated.
        self._views = [slot.view(self.flat).data for slot in bucket.slots]
        self._uses = self._count_uses()

    def _count_uses(self) -> int:
        """Return how many tensors there are that show this memory, and this look at it."""
        return int(torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata))

    def is_held(self) -> bool:
        """Return whether somebody keeps an old gradient that stands here, or a tensor made from one, as by detach()."""
        pairs = sum(param.tensor.is_complex() and self.holds(param) for param in self._params)
        if self._count_uses() > self._uses + pairs:
            return True
        for number, view in enumerate(self._views):
            kept = sys.getrefcount(view) > _references_to_a_view
            if kept and self._params[number].tensor.grad is not view:
                return True
        return False

    @torch.no_grad()
    def fill(self, grads: Sequence[torch.Tensor | None], factor: float) -> None:
        """Write `factor` times `grads`, zeros for none; what stands there and is still in use moves out."""
        targets, sources = [], []
        for param, view, grad in zip(self._params, self._views, grads, strict=True):
            if grad is not None and not grad.is_sparse:
                targets.append(view)
                sources.append(as_real(grad))
                continue
            if self.holds(param):
                param.tensor.grad = param.tensor.grad.clone()  # type: ignore[union-attr]
            view.zero_()
        if factor != 1.0 and self.flat.nbytes > LARGE_BYTES * len(targets):
            number = torch.tensor(factor, dtype=torch.float64)
            for target, source in zip(targets, sources, strict=True):
                torch.mul(source, number, out=target)
        elif targets:
            torch._foreach_copy_(targets, sources)
            scale_(self.flat, factor)

    def put(self, number: int) -> None:
        """Make what stands at a slot the gradient of its parameter."""
        tensor, combined = self._params[number].tensor, self._views[number]
        if tensor.grad is combined:
            return
        if tensor.is_complex():
            combined = torch.view_as_complex(combined)
        if tensor.grad is not None and tensor.grad.is_sparse:  # sparse_as_dense
            combined = combined.to_sparse(tensor.grad.sparse_dim())
        tensor.grad = combined

    def drop(self) -> None:
        """Take the gradients away that stand here."""
        for param in self._params:
            if self.holds(param):
                param.tensor.grad = None

    def holds(self, param: Accumulated) -> bool:
        """Return whether the gradient of `param` stands here."""
        grad = param.tensor.grad
        if grad is None or grad.is_sparse:
            return False
        return grad.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr()
