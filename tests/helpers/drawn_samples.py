"""The samples that all ranks drew, in one list."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

from dualdist.samplers import DealingSampler

T = TypeVar("T")


def in_step_order(drawn: Sequence[Sequence[T]]) -> list[T]:
    """Return the samples of all ranks by step: the first of each rank, then the second of each."""
    rounds = itertools.zip_longest(*drawn, fillvalue=None)
    return [item for items in rounds for item in items if item is not None]


def draw_steps(samplers: Sequence[DealingSampler[T]], steps: int, batch: int) -> list[T]:
    """Draw and count `steps` batches on each rank; return the samples by step."""
    drawn = []
    for sampler in samplers:
        own = list(itertools.islice(sampler, steps * batch))
        for start in range(0, len(own), batch):
            sampler.advance(len(own[start : start + batch]))
        drawn.append(own)
    return in_step_order(drawn)
