"""Iterables and iterable datasets, split over the ranks and the workers of their loaders."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

import torch

from .dealing import place_of

__all__ = ("split_by_rank",)

T_co = TypeVar("T_co", covariant=True)


def split_by_rank(
    iterable: Iterable[T_co],
    num_replicas: int | None = None,
    rank: int | None = None,
    drop_last: bool = False,
) -> torch.utils.data.IterableDataset[T_co]:
    """Return this rank's part of `iterable`, as a dataset: over all ranks and workers every item comes once.

    Item i goes to rank i % num_replicas. Every worker reads the whole of `iterable` and skips what is not its own:
    groups of `num_replicas` items go to the workers in turns. Ranks may get different numbers of items: train with
    `join`, or with `drop_last`.

    Args:
        iterable: yields the same items in the same order on all ranks, in every worker: it must neither shuffle by the
            global generators nor look at the worker itself. A new pass begins with `iter(iterable)`.
        num_replicas, rank: None: those of the joined world, taken now, since workers may not know it.
        drop_last: leave out the items that do not fill the last round of all ranks and workers, so that all ranks get
            equally many.

    Raises:
        NotInitializedError: num_replicas or rank is None before `init()`.
        ValueError: rank is not below num_replicas.
    """
    return _Split(iterable, *place_of(num_replicas, rank), drop_last)


class _Split(torch.utils.data.IterableDataset[T_co]):
    def __init__(self, iterable: Iterable[T_co], num_replicas: int, rank: int, drop_last: bool) -> None:
        self.iterable, self.num_replicas, self.rank, self.drop_last = iterable, num_replicas, rank, drop_last

    def __iter__(self) -> Iterator[T_co]:
        worker = torch.utils.data.get_worker_info()
        num_workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        place = number * self.num_replicas + self.rank
        round_size = num_workers * self.num_replicas
        if not self.drop_last:
            yield from itertools.islice(self.iterable, place, None, round_size)
            return
        kept: Any = None
        for count, item in enumerate(self.iterable):
            if count % round_size == place:
                kept = item
            if (count + 1) % round_size == 0:
                yield cast("T_co", kept)
