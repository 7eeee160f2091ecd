"""The order in which backward completes gradients, and which buckets are complete.

Most backwards complete the gradients in the same order. Once it is known, a hook only needs to look at the arrived
gradients when there is something to do, see GradSync.
"""

from __future__ import annotations

from collections.abc import Sequence

from .buckets import Bucket

__all__ = ("ArrivalOrder",)

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
        missing, bucket_of, num_bytes = self._missing, self.bucket_of, self._bytes
        for index in arrived:
            missing[bucket_of[index]] -= 1
            self._waiting_bytes += num_bytes[index]
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
