"""Iterables and iterable datasets, sharded over the ranks and the workers of their loaders."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

import torch

from ..checks import flag, instance
from .sharding import given_or_joined_world

__all__ = ("split_by_rank",)

T_co = TypeVar("T_co", covariant=True)


def split_by_rank(
    iterable: Iterable[T_co],
    num_replicas: int | None = None,
    rank: int | None = None,
    drop_last: bool = False,
) -> torch.utils.data.IterableDataset[T_co]:
    """Return this rank's shard of `iterable`, as a dataset. All ranks and workers together get every item once.

    Item i goes to rank i % num_replicas. Every worker reads all of `iterable` and skips the items of others: groups of
    `num_replicas` items go to the workers in turns. Ranks may get different numbers of items: train with `join`, or
    with `drop_last`.

    Args:
        iterable: must yield the same items in the same order on all ranks, in every worker. So it must not shuffle with
            the global generators, or depend on the worker. A new pass starts with `iter(iterable)`.
        num_replicas, rank: None: the values of the joined world, read in this call, because workers may not know them.
        drop_last: leave out the last items if there are too few for all ranks and workers, so that all ranks get the
            same number.

    Raises:
        NotInitializedError: num_replicas or rank is None before `init()`.
        ValueError: rank is not below num_replicas.
    """
    instance("iterable", iterable, Iterable, "an iterable", "Pass an IterableDataset or a list.")
    return _Split(iterable, *given_or_joined_world(num_replicas, rank), flag("drop_last", drop_last))


class _Split(torch.utils.data.IterableDataset[T_co]):
    def __init__(self, iterable: Iterable[T_co], num_replicas: int, rank: int, drop_last: bool) -> None:
        self.iterable, self.num_replicas, self.rank, self.drop_last = iterable, num_replicas, rank, drop_last

    def __iter__(self) -> Iterator[T_co]:
        worker = torch.utils.data.get_worker_info()
        num_workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        index = number * self.num_replicas + self.rank
        round_size = num_workers * self.num_replicas
        if not self.drop_last:
            yield from itertools.islice(self.iterable, index, None, round_size)
            return
        kept: Any = None
        for count, item in enumerate(self.iterable):
            if count % round_size == index:
                kept = item
            if (count + 1) % round_size == 0:
                yield cast("T_co", kept)
