"""The buckets in which the gradients of some parameters are sent, with their memory."""

from __future__ import annotations

from collections.abc import Sequence

from ..world.process_sets import channel_of
from .arrival_order import ArrivalOrder
from .bucket_memory import BucketMemory
from .buckets import lay_out
from .contributions import DENSE, SPARSE, Contributions
from .options import SyncOptions
from .tracked_parameter import TrackedParameter

__all__ = ("Layout",)


class Layout:
    """The buckets of some parameters, the order in which these arrive, and what the ranks contribute."""

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
        self._memory: dict[int, BucketMemory] = {}

    def memory_of(self, place: int) -> BucketMemory:
        """Return memory for the next gradients of the bucket at `place`: the last one, unless the program uses it."""
        if place in self._memory and self._memory[place].is_in_use():
            del self._memory[place]
        if place not in self._memory:
            bucket = self.buckets[place]
            members = [self.params[slot.param] for slot in bucket.slots]
            group = channel_of(self._options.process_set).gradients
            flat = group.zeros(bucket.length, bucket.dtype, bucket.device)
            self._memory[place] = BucketMemory(
                bucket, members, flat, sparse_as_dense=self._options.sparse_as_dense
            )
        return self._memory[place]

    def release_memory(self) -> None:
        """Free the buckets' memory."""
        self._memory.clear()
