"""The order in which backward completes gradients, and which buckets are complete.

Most backwards complete the gradients in the same order. Once it is known, a hook only needs to look at the arrived
gradients when a bucket should be complete, see GradSync.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .buckets import Bucket

__all__ = ("ArrivalOrder",)


class ArrivalOrder:
    """Counts the gradients that each bucket still misses, and remembers the order of a complete backward.

    Parameters are given by index.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.bucket_of = {slot.param: place for place, bucket in enumerate(buckets) for slot in bucket.slots}
        self._sizes = [len(bucket.slots) for bucket in buckets]
        self.expected: list[int] = []
        """All parameters, in the order in which the next backward should complete them. Empty: not known."""
        self.stops: list[int] = []
        """How many gradients have arrived in that order each time that buckets can be sent."""
        self.start_over()

    def start_over(self) -> None:
        """Prepare for the next backward."""
        self._missing = list(self._sizes)

    def mark(self, arrived: Iterable[int]) -> None:
        """Count the gradients that have `arrived`."""
        missing, bucket_of = self._missing, self.bucket_of
        for index in arrived:
            missing[bucket_of[index]] -= 1

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
            if self.is_complete(sent):
                stops.append(count)
                while self.is_complete(sent):
                    sent += 1
        self.expected, self.stops = list(order), stops
        self.start_over()
