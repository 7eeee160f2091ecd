"""The buckets in which the gradients of some parameters are sent, with their memory."""

from __future__ import annotations

from collections.abc import Sequence

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
            [param.tensor for param in params],
            sparse,
            options.groups,
            options.bucket_cap_mb,
            small_last=options.comm_hook is None,  # each call of a hook costs more than what the split hides
        )
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

    def memory_of(self, place: int) -> BucketMemory:
        """Return the memory of the bucket at `place` for this backward: that of the last one, unless it is in use."""
        if place not in self._current:
            self._current[place] = self._free_memory(place, self._last.pop(place, None))
        return self._current[place]

    def memory_to_send(self, place: int) -> BucketMemory:
        """Do the same, but take other memory if the program has kept a gradient that moved there in this backward."""
        known = self._current.pop(place, None) or self._last.pop(place, None)
        self._current[place] = self._free_memory(place, known)
        return self._current[place]

    def _free_memory(self, place: int, known: BucketMemory | None) -> BucketMemory:
        """Return `known` if it is not in use, else new memory."""
        return self._new_memory(place) if known is None or known.is_in_use() else known

    def _new_memory(self, place: int) -> BucketMemory:
        bucket = self.buckets[place]
        if bucket.device.type == "cpu":
            keep_freed_memory()
        members = [self.params[slot.param] for slot in bucket.slots]
        group = channel_of(self._options.process_set).gradients
        flat = group.zeros(bucket.length, bucket.dtype, bucket.device)
        return BucketMemory(bucket, members, flat, sparse_as_dense=self._options.sparse_as_dense)

    def release_memory(self) -> None:
        """Free the buckets' memory."""
        self._current, self._last = {}, {}
