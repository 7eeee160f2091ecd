"""What a Reducer knows of its buckets: which there are, the order in which backward fills them, and their memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ..world.process_sets import channel_of
from .bucket_memory import DENSE, NEW, SPARSE, Bucket, BucketMemory, Contributions, TrackedParameter, lay_out
from .combiner import SyncOptions

# The order in which backward completes gradients, and which buckets are complete.
#
# Most backwards complete the gradients in the same order. Once it is known, a hook only needs to look at the arrived
# gradients when there is something to do, see Arrivals.

_MOVE_BYTES = 1 << 20
"""How much may wait on a CPU until it is moved to the buckets, see Reducer.mark_ready."""


class ArrivalOrder:
    """Counts the gradients that each bucket still misses, and remembers the order of a complete backward.

    Parameters are given by index.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.bucket_of = {slot.param: place for place, bucket in enumerate(buckets) for slot in bucket.slots}
        self._sizes = [len(bucket.slots) for bucket in buckets]
        self._bytes = {
            slot.param: slot.shape.numel() * bucket.dtype.itemsize if bucket.device.type == "cpu" else 0
            for bucket in buckets
            for slot in bucket.slots
        }
        self.expected: list[int] = []
        """All parameters, in the order in which the next backward should complete them. Empty: not known."""
        self.stops: list[int] = []
        """How many gradients have arrived in that order each time that some can be sent or moved."""
        self.start_over()

    def start_over(self) -> None:
        """Prepare for the next backward."""
        self._missing = list(self._sizes)
        self._waiting: list[int] = []
        """Gradients that have arrived since the last move to the buckets."""
        self._waiting_bytes = 0

    def mark(self, arrived: Sequence[int]) -> None:
        """Count the gradients that have `arrived`."""
        missing = self._missing
        for place in map(self.bucket_of.__getitem__, arrived):
            missing[place] -= 1
        self._waiting_bytes += sum(map(self._bytes.__getitem__, arrived))
        self._waiting += arrived

    def take_waiting(self, sent: int) -> dict[int, list[int]]:
        """Return bucket -> gradients that should move there, except to the first `sent` buckets.

        These are all on the CPU that have arrived since the last move, or none while they are small. Gradients that
        are sent as sparse ones have no place in a bucket.
        """
        taken: dict[int, list[int]] = {}
        if self._waiting_bytes < _MOVE_BYTES:
            return taken
        for index in self._waiting:
            if self._bytes[index] and (place := self.bucket_of[index]) >= sent:
                taken.setdefault(place, []).append(index)
        self._waiting, self._waiting_bytes = [], 0
        return taken

    def is_complete(self, place: int) -> bool:
        """Return whether all gradients of the bucket at `place` have arrived."""
        return place < len(self._missing) and self._missing[place] == 0

    def learn(self, order: Sequence[int]) -> None:
        """Expect that later backwards complete the gradients in this order, if it has all of them once."""
        if len(order) != len(self.bucket_of) or set(order) != self.bucket_of.keys():
            return
        self.start_over()
        sent, stops = 0, []
        for count, index in enumerate(order, 1):
            self.mark([index])
            before = sent
            while self.is_complete(sent):
                sent += 1
            if sent > before or self.take_waiting(sent):
                stops.append(count)
        self.expected, self.stops = list(order), stops
        self.start_over()


# Keeps the memory that each training step frees and allocates again, instead of giving it back to the kernel.

_CHUNK_BYTES = (32 << 20) - (1 << 14)
"""The largest chunk whose release raises the limits on 64-bit (DEFAULT_MMAP_THRESHOLD_MAX), less its alignment."""
_CHUNKS = 4
"""So that one is mapped, also if the heap has some room for them."""


@functools.cache
def keep_freed_memory() -> None:
    """Raise two limits of malloc, if it is glibc's, so that a step uses the memory that the last one has freed.

    By default, glibc maps each chunk of 128 KiB or more from the kernel, and unmaps it when it is freed; and it gives
    as much back as soon as it is free at the end of the heap. Each page must then be mapped again, which takes a fifth
    of a step of ResNet-18 on a CPU. When a program frees a mapped chunk of up to 32 MiB, glibc raises M_MMAP_THRESHOLD
    to its size and M_TRIM_THRESHOLD to twice that (mallopt(3)). This function frees such chunks. Local, once in a
    process. It has no effect if the program has set one of M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD and
    M_MMAP_MAX, or the user the variables of those names, such as MALLOC_TRIM_THRESHOLD_.
    """
    # Their pages are not written, unless torch fills new tensors, so they cost no memory.
    chunks = [torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device="cpu") for _ in range(_CHUNKS)]
    del chunks


class Layout:
    """The buckets of some parameters, the order in which their gradients arrive, and what the ranks contribute."""

    def __init__(
        self, params: Sequence[TrackedParameter], options: SyncOptions, sparse: frozenset[int] = frozenset()
    ) -> None:
        """sparse: parameters (by index) that have had a sparse gradient on some rank."""
        self.params = params
        self.buckets = lay_out(
            params,
            sparse,
            options.groups,
            options.bucket_cap_mb,
            small_last=options.comm_hook is None,  # each call of a hook costs more than what the split hides
        )
        self.is_on_one_device = len({bucket.device for bucket in self.buckets}) == 1
        self.members = [[params[slot.param] for slot in bucket.slots] for bucket in self.buckets]
        """The parameters of each bucket."""
        self.order = ArrivalOrder(self.buckets)
        self.contributions = Contributions(
            [
                bytes(NEW | (SPARSE if slot.param in sparse else DENSE) for slot in bucket.slots)
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
            grads: what is sent in it now. The memory is checked again then, because a hook may have kept a gradient
                that has moved there. None: nothing yet, and other gradients only move there.
            is_new: as for BucketMemory.can_take.
            in_place: whether gradients that are there may be sent from there.
        """
        known = self._current.get(place)
        if grads is None and known is not None and known.is_in_place():
            return known
        known = known or self._last.pop(place, None)
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
