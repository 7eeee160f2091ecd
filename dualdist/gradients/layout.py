"""The buckets in which the gradients of some parameters are sent, with their memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..world.process_sets import channel_of
from .arrival_order import ArrivalOrder
from .bucket_memory import BucketMemory
from .buckets import lay_out
from .contributions import DENSE, SPARSE, Contributions
from .heap import keep_freed_memory
from .options import SyncOptions
from .tracked_parameter import TrackedParameter

__all__ = ("Layout",)


class Layout:
    """The buckets of some parameters, the order in which their gradients arrive, and what the ranks contribute."""

    def __init__(
        self, params: Sequence[TrackedParameter], options: SyncOptions, sparse: frozenset[int] = frozenset()
    ) -> None:
        """sparse: parameters (by index) that have had a sparse gradient on some rank."""
        self.params = params
        self.sparse = sparse
        self.buckets = lay_out(
            [param.like for param in params],
            sparse,
            options.groups,
            options.bucket_cap_mb,
            devices=[param.device for param in params],
            small_last=options.comm_hook is None,  # each call of a hook costs more than what the split hides
        )
        self.members = [[params[slot.param] for slot in bucket.slots] for bucket in self.buckets]
        """The parameters of each bucket."""
        self.order = ArrivalOrder(self.buckets)
        self.contributions = Contributions(
            [
                bytes(SPARSE if slot.param in sparse else DENSE for slot in bucket.slots)
                for bucket in self.buckets
            ]
        )
        self._options = options
        self._current: dict[int, BucketMemory] = {}
        """The memory of each bucket that the current backward uses."""
        self._last: dict[int, BucketMemory] = {}
        """The memory that earlier backwards used."""

    def start_over(self) -> None:
        """Prepare for the next backward."""
        self.order.start_over()
        self._last |= self._current
        self._current = {}

    def fits(self, place: int, grads: Sequence[torch.Tensor | None]) -> bool:
        """Return whether all gradients of the bucket at `place` have the expected shape, dtype and device."""
        is_on_cpu = self.buckets[place].device.type == "cpu"  # to compare devices takes three times as long
        return all(
            [
                grad is None
                or (
                    grad.dtype is param.dtype
                    and grad.shape == param.shape
                    and (grad.is_cpu if is_on_cpu else grad.device == param.device)
                )
                for grad, param in zip(grads, self.members[place], strict=True)
            ]
        )

    def memory_of(
        self,
        place: int,
        grads: Sequence[torch.Tensor | None] | None = None,
        is_new: Sequence[bool] | None = None,
        *,
        in_place: bool = True,
    ) -> BucketMemory:
        """Return the memory of the bucket at `place` for this backward.

        It is that of the last backward, unless the script needs what is there (BucketMemory.can_take).

        Args:
            grads: what is sent in it now. If given, the memory is checked again, because a hook may have kept a
                gradient that has moved there.
            is_new: as for BucketMemory.can_take.
            in_place: whether gradients that are there may be sent from there.
        """
        known = self._current.get(place) or self._last.pop(place, None)
        if place in self._current and grads is None:
            return self._current[place]
        members = self.members[place]
        if grads is None:
            grads = [param.tensor.grad for param in members]
        if known is None or not known.can_take(grads, is_new, in_place=in_place):
            bucket = self.buckets[place]
            if bucket.device.type == "cpu":
                keep_freed_memory()
            group = channel_of(self._options.process_set).gradients
            flat = group.zeros(bucket.length, bucket.dtype, bucket.device)
            known = BucketMemory(bucket, members, flat)
        self._current[place] = known
        return known

    def release_memory(self) -> None:
        """Free the buckets' memory."""
        self._current, self._last = {}, {}
