"""The memory of a bucket: a flat tensor in which gradients are summed, and views of it that become the gradients.

A script may put any memory anywhere between two calls, so no tensor that it can reach is trusted to be where it was. A
gradient lies in its slot if it has the slot's address and strides. Views are handed out as new tensors. The number of
tensors that use the storage shows whether the script still has one that is no longer a gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..collectives.reduction import scale_
from .buckets import Bucket, as_real
from .contributions import DENSE, NOTHING, SPARSE
from .tracked_parameter import TrackedParameter

__all__ = ("BucketMemory", "addresses_of")

LARGE_BYTES = 1 << 20
"""Mean gradient size in bytes above which scaling during the copy is faster than scaling the copy in the cache."""


def addresses_of(grads: Sequence[torch.Tensor | None]) -> list[int | None]:
    """Return where gradients lie; None for those that have no memory of their own."""
    return [None if grad is None or grad.is_sparse else grad.data_ptr() for grad in grads]


class BucketMemory:
    """The memory of one bucket. All lists with one item per parameter are in the order of the bucket's slots."""

    def __init__(
        self,
        bucket: Bucket,
        params: Sequence[TrackedParameter],
        flat: torch.Tensor,
    ) -> None:
        """flat: zeros, ((bucket.length,), bucket.dtype)."""
        self.params = params
        self.flat = flat
        self._places = {slot.param: place for place, slot in enumerate(bucket.slots)}
        self._indices = frozenset(self._places)
        self._tensors = [param.tensor for param in params]
        self._all_dense = bytes([DENSE]) * len(params)
        self._views = [slot.view(self.flat).data for slot in bucket.slots]
        self._gradients = [
            torch.view_as_complex(view) if param.dtype.is_complex else view
            for param, view in zip(params, self._views, strict=True)
        ]
        """What is handed out as new tensors; complex numbers are pairs in `_views`."""
        self._addresses = [view.data_ptr() if view.numel() else -1 for view in self._views]
        self._start = flat.data_ptr()
        self._there: Sequence[int] = ()
        """The places of the gradients that lay in their slots when `can_take` looked."""
        self._is_plain = False
        """Whether all gradients were there then, and dense."""
        self._is_replaced: Sequence[bool] = ()
        """Whether each `.grad` may become a view of this memory. Else the combined numbers are copied into it."""
        self._has_pairs = any(param.dtype.is_complex for param in params)
        self._uses = self._count_uses()

    def _count_uses(self) -> int:
        """Return how many tensors use this storage and how many references there are to it in Python."""
        storage = self.flat.untyped_storage()
        return int(torch._C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)

    def slots_of(self, grads: Sequence[torch.Tensor | None], found: Sequence[int | None]) -> list[int]:
        """Return the places of the gradients that lie in their slots. found: the addresses of `grads`."""
        there = [
            place for place, (own, slot) in enumerate(zip(found, self._addresses, strict=True)) if own == slot
        ]
        return [place for place in there if self._gradients[place].stride() == grads[place].stride()]  # type: ignore[union-attr]

    def can_take(
        self, grads: Sequence[torch.Tensor | None], is_new: Sequence[bool] | None, *, in_place: bool
    ) -> bool:
        """Return whether nobody else needs what is in this memory, when `grads` are sent in it.

        Somebody does if a tensor uses it that is no gradient in its slot: an earlier gradient, a view, or the gradient
        of another parameter; or if a gradient lies here that is not sent. A script may also have resized the storage.

        Args:
            is_new: whether each one is a contribution; one that is not may have to stay as it is. None: all are.
            in_place: whether gradients may change here while they are sent.
        """
        found = addresses_of(grads)
        self._there, self._is_plain = self.slots_of(grads, found), None not in found
        if self._there and (not in_place or (is_new and not all([is_new[place] for place in self._there]))):
            return False
        if self.flat.data_ptr() != self._start or self._count_uses() > self._uses + len(self._there):
            return False
        return not any(
            grad is None and self.holds(param) for grad, param in zip(grads, self.params, strict=True)
        )

    @torch.no_grad()
    def take_gradients(self, indices: Sequence[int]) -> None:
        """Move the dense gradients of some parameters here before `pack`; their values remain. indices: of parameters.

        Only those that backward has made, of the expected shape, dtype and device.
        """
        places = [self._places[index] for index in indices if not self.params[self._places[index]].is_given]
        grads = [self._tensors[place].grad for place in places]
        moving = [
            (place, grad)
            for place, grad in zip(places, grads, strict=True)
            if grad is not None and not grad.is_sparse and self.params[place].fits(grad)
        ]
        if moving:
            torch._foreach_copy_(
                [self._gradients[place] for place, _ in moving], [grad for _, grad in moving]
            )
        for place, _ in moving:
            self._tensors[place].grad = self._gradients[place].data

    @torch.no_grad()
    def pack(
        self, grads: Sequence[torch.Tensor | None], is_new: Sequence[bool] | None, factor: float
    ) -> bytes:
        """Write what this rank sends; return the kind of contribution to each gradient, see contributions.py.

        Args:
            grads: multiplied by `factor`. Zeros are written for a gradient that is None or sparse. `can_take` has
                returned True for them.
            is_new: whether each gradient counts as a contribution. None: all do.
        """
        self._is_replaced = [not param.is_given for param in self.params]
        there = set(self._there)
        targets: list[torch.Tensor] = self._views
        sources: list[Any] = list(grads)
        if there or self._has_pairs or not self._is_plain:
            targets, sources = [], []
            for place, (grad, view) in enumerate(zip(grads, self._views, strict=True)):
                if grad is None or grad.is_sparse:
                    view.zero_()
                elif place not in there:
                    targets.append(view)
                    sources.append(as_real(grad) if self._has_pairs else grad)
        if factor != 1.0 and self.flat.nbytes > LARGE_BYTES * len(self._views):
            number = torch.tensor(factor, dtype=torch.float64)
            for target, source in zip(targets, sources, strict=True):
                torch.mul(source, number, out=target)
            for place in there:
                self._views[place].mul_(number)
        else:
            if targets:
                torch._foreach_copy_(targets, sources)
            scale_(self.flat, factor)
        if len(targets) + len(there) == len(grads) and (is_new is None or all(is_new)):
            return self._all_dense
        is_new = [True] * len(grads) if is_new is None else is_new
        return bytes(
            NOTHING if grad is None or not new else SPARSE if grad.is_sparse else DENSE
            for new, grad in zip(is_new, grads, strict=True)
        )

    @torch.no_grad()
    def fill(self, combined: torch.Tensor) -> None:
        """Copy what the ranks have combined, (n,) of any dtype and device, unless it is this memory."""
        if combined.data_ptr() != self.flat.data_ptr() or combined.dtype != self.flat.dtype:
            self.flat.copy_(combined)

    def set_early(self, kinds: bytes) -> None:
        """Make views of this memory the gradients while the data is being sent, where backward has made `.grad`.

        A gradient that the script may know stays. Sparse ones stay, too, because a search for the numbers that are not
        zero writes beyond its result if these change meanwhile (nonzero_out_cpu in torch).
        """
        if kinds == self._all_dense and all(self._is_replaced):
            for tensor, view in zip(self._tensors, self._gradients, strict=True):
                tensor.grad = view.data
            return
        for tensor, view, kind, is_replaced in zip(
            self._tensors, self._gradients, kinds, self._is_replaced, strict=True
        ):
            if kind == DENSE and is_replaced and not tensor.grad.is_sparse:  # type: ignore[union-attr]
                tensor.grad = view.data

    @torch.no_grad()
    def set_gradients(self, kinds: bytes) -> None:
        """Make the combined numbers the gradients of those parameters whose kind is DENSE alone.

        They are written into memory that was the gradient before backward: a script may hold it.
        """
        grads = [tensor.grad for tensor in self._tensors]
        found = addresses_of(grads)
        if found == self._addresses:
            return
        there = set(self.slots_of(grads, found))
        written: list[tuple[torch.Tensor, torch.Tensor]] = []
        for place, (tensor, view, kind) in enumerate(zip(self._tensors, self._gradients, kinds, strict=True)):
            if kind != DENSE or place in there:
                continue
            grad = grads[place]
            if grad is None:
                tensor.grad = view.data
            elif grad.is_sparse:  # sparse_as_dense
                tensor.grad = view.to_sparse(grad.sparse_dim())
            elif self._is_replaced[place]:
                tensor.grad = view.data
            else:
                written.append((grad, view))
        if written:
            torch._foreach_copy_([grad for grad, _ in written], [view for _, view in written])

    def contributed(self, kinds: bytes) -> Iterable[int]:
        """Return the parameters, by index, to whose gradients some rank has contributed."""
        if kinds == self._all_dense:
            return self._indices
        return [index for index, kind in zip(self._places, kinds, strict=True) if kind]

    def dense_parts(self, kinds: bytes) -> dict[int, torch.Tensor | None]:
        """Return, for each parameter with sparse gradients, the combined dense ones, None if no rank has one."""
        return {
            index: combined if kind & DENSE else None
            for index, combined, kind in zip(self._places, self._gradients, kinds, strict=True)
            if kind & SPARSE
        }

    def clear_gradients(self) -> None:
        """Set the gradients that lie in this memory to None."""
        for param in self.params:
            if self.holds(param):
                param.tensor.grad = None

    def holds(self, param: TrackedParameter) -> bool:
        """Return whether the gradient of `param` lies in this memory."""
        grad = param.tensor.grad
        if grad is None or grad.is_sparse:
            return False
        return grad.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr()
