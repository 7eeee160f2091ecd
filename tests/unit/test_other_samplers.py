"""Weighted samplers, batch samplers, custom samplers and iterables, sharded over the ranks and their workers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from torch.utils.data import DistributedSampler as TorchSampler

from dualdist.samplers import DistributedSampler, DistributedSamplerWrapper, split_by_rank

from ..helpers.drawn_samples import draw_steps, in_step_order

lengths, worlds, epochs, flags = st.integers(0, 40), st.integers(1, 6), st.integers(0, 3), st.booleans()
quick = settings(max_examples=60, deadline=None)


def generator_states() -> list[Any]:
    return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]


def test_global_generators_are_neither_used_nor_seeded() -> None:
    class Restless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            yield from (random.randrange(10**6), int(np.random.randint(10**6)), int(torch.randint(10**6, ())))

        def __len__(self) -> int:
            return 3

    before = generator_states()
    list(DistributedSampler(range(9), 2, 0))
    drawn = list(DistributedSamplerWrapper(Restless(), 1, 0, seed=5))
    list(DistributedSamplerWrapper(WeightedRandomSampler([1.0, 2.0], 9), 2, 0))
    assert generator_states() == before
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert list(DistributedSamplerWrapper(Restless(), 1, 0, seed=5)) == drawn


def test_all_ranks_draw_equal_weighted_samples_that_differ_by_epoch() -> None:
    weights = [float(place) for place in range(20)]
    drawn = []
    for epoch in (0, 1):
        shards = []
        for rank in range(3):
            torch.manual_seed(rank)  # as users do, for different dropout on each rank
            own = torch.Generator().manual_seed(rank)
            inner = WeightedRandomSampler(weights, 30, generator=None if rank else own)
            sampler = DistributedSamplerWrapper(inner, 3, rank, seed=2)
            sampler.set_epoch(epoch)
            shards.append(list(sampler))
            assert inner.generator is (None if rank else own)
            assert own.initial_seed() == rank
        generator = torch.Generator().manual_seed(2 + epoch)
        expected = torch.multinomial(torch.tensor(weights).double(), 30, True, generator=generator)
        assert in_step_order(shards) == expected.tolist()
        drawn.append(in_step_order(shards))
    assert drawn[0] != drawn[1]


@quick
@given(before=worlds, after=worlds, steps=st.integers(0, 5))
def test_batch_samplers_are_sharded_in_whole_batches_and_resumed(before: int, after: int, steps: int) -> None:
    def wrapped(world: int, rank: int) -> DistributedSamplerWrapper[list[int]]:
        inner = BatchSampler(RandomSampler(range(23)), 4, drop_last=False)
        return DistributedSamplerWrapper(inner, world, rank, pad=False)

    order = list(wrapped(1, 0))
    assert sorted(itertools.chain(*order)) == list(range(23))
    first, second = ([wrapped(world, rank) for rank in range(world)] for world in (before, after))
    assert draw_steps(first, steps, 1) == order[: steps * before]
    for sampler in second:
        sampler.load_state_dict(first[0].state_dict())
    assert in_step_order([list(sampler) for sampler in second]) == order[steps * before :]


def test_a_wrapped_batch_sampler_feeds_a_loader() -> None:
    inner = BatchSampler(RandomSampler(range(8)), 2, drop_last=False)
    wrappers = [DistributedSamplerWrapper(inner, 2, rank) for rank in range(2)]
    data: Any = list(range(8))
    loaders = [DataLoader(data, batch_sampler=wrapper) for wrapper in wrappers]
    assert [len(loader) for loader in loaders] == [2, 2]
    assert sorted(torch.cat([batch for loader in loaders for batch in loader]).tolist()) == list(range(8))


def test_the_wrapped_samplers_set_epoch_is_called() -> None:
    class ByEpoch(Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.epoch, self.epoch + 3 + self.epoch))

    sampler = DistributedSamplerWrapper(ByEpoch(), 1, 0)
    assert (len(sampler), list(sampler)) == (3, [0, 1, 2])
    sampler.set_epoch(2)
    assert (len(sampler), list(sampler)) == (5, [2, 3, 4, 5, 6])


def test_a_sharded_sampler_is_refused() -> None:
    data: Any = range(8)
    inner: Any = TorchSampler(data, 2, 0)
    for sampler in (inner, BatchSampler(inner, 2, drop_last=False)):
        with pytest.raises(ValueError, match="already sharded over the ranks"):
            DistributedSamplerWrapper(sampler, 2, 0)


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


@quick
@given(length=lengths, world=worlds)
def test_an_iterable_is_sharded_in_turns(length: int, world: int) -> None:
    shards = [list(split_by_rank(Stream(length), world, rank)) for rank in range(world)]
    assert shards == [list(range(length))[rank::world] for rank in range(world)]
    whole = length // world * world
    even = [list(split_by_rank(Stream(length), world, rank, drop_last=True)) for rank in range(world)]
    assert even == [list(range(whole))[rank::world] for rank in range(world)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_and_workers_together_get_every_item_once(drop_last: bool) -> None:
    shards = [
        [
            int(item)
            for item in DataLoader(
                split_by_rank(Stream(23), 2, rank, drop_last), batch_size=None, num_workers=2
            )
        ]
        for rank in range(2)
    ]
    assert sorted(shards[0] + shards[1]) == list(range(20 if drop_last else 23))
    assert all(item % 2 == rank for rank, shard in enumerate(shards) for item in shard)
    if drop_last:
        assert len(shards[0]) == len(shards[1])
