"""What ranks have drawn from their samplers, put together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

from dualdist.samplers import DealingSampler

__all__ = ("trained", "turns")

T = TypeVar("T")


def turns(hands: Sequence[Sequence[T]]) -> list[T]:
    """Return the items of all ranks in the order of the steps: one of each rank, then the next of each."""
    rounds = itertools.zip_longest(*hands, fillvalue=None)
    return [item for items in rounds for item in items if item is not None]


def trained(samplers: Sequence[DealingSampler[T]], steps: int, batch: int) -> list[T]:
    """Draw and count `steps` batches on each rank, and return the samples in the order of the steps."""
    hands = []
    for sampler in samplers:
        hand = list(itertools.islice(sampler, steps * batch))
        for start in range(0, len(hand), batch):
            sampler.advance(len(hand[start : start + batch]))
        hands.append(hand)
    return turns(hands)
