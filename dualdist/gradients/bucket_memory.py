"""The memory of a bucket: a flat tensor in which gradients are summed, and views of it that become the gradients."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from ..collectives.reduction import scale_
from .buckets import Bucket, as_real
from .contributions import DENSE, NOTHING, SPARSE
from .tracked_parameter import TrackedParameter

__all__ = ("BucketMemory",)

LARGE_BYTES = 1 << 20
"""Mean gradient size in bytes above which scaling during the copy is faster than scaling the copy in the cache."""


class BucketMemory:
    """The memory of one bucket. All lists with one item per parameter are in the order of the bucket's slots."""

    def __init__(
        self,
        bucket: Bucket,
        params: Sequence[TrackedParameter],
        flat: torch.Tensor,
        *,
        sparse_as_dense: bool = False,
    ) -> None:
        """flat: zeros, ((bucket.length,), bucket.dtype). sparse_as_dense: whether sparse gradients are sent in it."""
        self.params = params
        self.flat = flat
        self._places = {slot.param: place for place, slot in enumerate(bucket.slots)}
        self._tensors = [param.tensor for param in params]
        self._dtypes = [param.dtype for param in params]
        self._devices = [param.device for param in params]
        self._is_on_cpu = all(device.type == "cpu" for device in self._devices)
        self._all_dense = bytes([DENSE]) * len(params)
        # .data gives each view a version counter of its own, which TrackedParameter.count_pass needs.
        self._views = [slot.view(self.flat).data for slot in bucket.slots]
        self._gradients = [
            torch.view_as_complex(view) if param.tensor.is_complex() else view
            for param, view in zip(params, self._views, strict=True)
        ]
        self._sparse_as_dense = sparse_as_dense
        self._replaces_dense = False
        """Whether each parameter had a dense gradient when this memory was written, until `set_gradients` runs."""
        self._has_pairs = any(param.tensor.is_complex() for param in params)
        self._uses = self._count_uses()
        self._references = self._count_references()

    def _count_uses(self) -> int:
        """Return how many tensors use this storage, including the reference that this call makes."""
        return int(torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata))

    def _count_references(self) -> list[int]:
        return list(map(sys.getrefcount, self._gradients))

    def is_in_use(self) -> bool:
        """Return whether the user's program still refers to this memory: to an earlier gradient or a view of one."""
        if self._count_uses() > self._uses:
            return True
        references = self._count_references()
        return references != self._references and any(
            now > before and param.tensor.grad is not gradient
            for now, before, param, gradient in zip(
                references, self._references, self.params, self._gradients, strict=True
            )
        )

    def has_unmoved_parameters(self) -> bool:
        """Return whether all parameters have the expected dtype and device."""
        if [tensor.dtype for tensor in self._tensors] != self._dtypes:
            return False
        if self._is_on_cpu:  # a list of devices would take three times as long
            return all([tensor.is_cpu for tensor in self._tensors])
        return [tensor.device for tensor in self._tensors] == self._devices

    def current_gradients(self) -> list[torch.Tensor | None]:
        """Return the parameters' gradients."""
        return [tensor.grad for tensor in self._tensors]

    @torch.no_grad()
    def take_gradients(self, indices: Sequence[int]) -> None:
        """Move the dense gradients of some parameters here before `pack`; their values remain. indices: of parameters.

        Gradients of a parameter that has another dtype or device than expected stay where they are.
        """
        places = [self._places[index] for index in indices]
        grads = [self._tensors[place].grad for place in places]
        moving = [
            (place, grad)
            for place, grad in zip(places, grads, strict=True)
            if grad is not None and grad is not self._gradients[place] and not grad.is_sparse
            if not self.params[place].moved()
        ]
        if moving:
            torch._foreach_copy_(
                [self._gradients[place] for place, _ in moving], [grad for _, grad in moving]
            )
        for place, _ in moving:
            self._tensors[place].grad = self._gradients[place]
            self.params[place].record_version()

    @torch.no_grad()
    def pack(
        self, grads: Sequence[torch.Tensor | None], is_new: Sequence[bool] | None, factor: float
    ) -> bytes:
        """Write what this rank sends; return the kind of contribution to each gradient, see contributions.py.

        Args:
            grads: multiplied by `factor`. Zeros are written for a gradient that is None or sparse. If the parameter's
                current gradient lies in the memory that they overwrite, it is copied first.
            is_new: whether each gradient counts as a contribution. None: all do.
        """
        sources = [grad for grad in grads if grad is not None and not grad.is_sparse]
        is_whole = len(sources) == len(grads)
        self._replaces_dense = is_whole and not self._sparse_as_dense
        targets = self._views if is_whole else self._clear(grads)
        if self._has_pairs:
            sources = [as_real(source) for source in sources]
        if factor != 1.0 and self.flat.nbytes > LARGE_BYTES * len(targets):
            number = torch.tensor(factor, dtype=torch.float64)
            for target, source in zip(targets, sources, strict=True):
                torch.mul(source, number, out=target)
        elif targets:
            torch._foreach_copy_(targets, sources)
            scale_(self.flat, factor)
        if is_whole and (is_new is None or all(is_new)):
            return self._all_dense
        is_new = [True] * len(grads) if is_new is None else is_new
        return bytes(
            NOTHING if grad is None or not new else SPARSE if grad.is_sparse else DENSE
            for new, grad in zip(is_new, grads, strict=True)
        )

    def _clear(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Write zeros where `grads` has no dense gradient; return the places of the dense ones."""
        targets = []
        for param, view, grad in zip(self.params, self._views, grads, strict=True):
            if grad is not None and not grad.is_sparse:
                targets.append(view)
                continue
            if self.holds(param):
                param.tensor.grad = param.tensor.grad.clone()  # type: ignore[union-attr]
            view.zero_()
        return targets

    @torch.no_grad()
    def fill(self, combined: torch.Tensor) -> None:
        """Copy what the ranks have combined, (n,) of any dtype and device, unless it is this memory."""
        if combined.data_ptr() != self.flat.data_ptr() or combined.dtype != self.flat.dtype:
            self.flat.copy_(combined)

    def set_gradients(self, kinds: bytes, *, early: bool = False) -> None:
        """Make the views of this memory the gradients of those parameters whose kind is DENSE alone.

        early: while the data is under way. Then sparse gradients stay, because a search for the numbers that are not
            zero writes beyond its result if these change meanwhile (nonzero_out_cpu in torch).
        """
        if self._replaces_dense and kinds == self._all_dense:
            # Without a look at the old gradients, for each of which torch would make a Python object.
            for tensor, combined in zip(self._tensors, self._gradients, strict=True):
                tensor.grad = combined
            self._replaces_dense = False
            return
        for tensor, combined, kind in zip(self._tensors, self._gradients, kinds, strict=True):
            if kind == DENSE and (grad := tensor.grad) is not combined:
                if grad is not None and grad.is_sparse:  # sparse_as_dense
                    if early:
                        continue
                    combined = combined.to_sparse(grad.sparse_dim())
                tensor.grad = combined

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
