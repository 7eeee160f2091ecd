"""Weighted samplers, batch samplers, custom samplers and iterables, sharded over the ranks and their workers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler
from torch.utils.data import DistributedSampler as TorchSampler

from dualdist.samplers import DistributedSampler, DistributedSamplerWrapper, split_by_rank

from ..helpers.drawn_samples import draw_steps, in_step_order
from .test_samplers import lengths, quick, worlds


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


class ByEpoch(Sampler[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch, self.epoch + 3 + self.epoch))


def test_the_epoch_reaches_the_wrapped_sampler_and_one_inside_a_batch_sampler() -> None:
    plain = DistributedSamplerWrapper(ByEpoch(), 1, 0)
    assert (len(plain), list(plain)) == (3, [0, 1, 2])
    plain.set_epoch(2)
    assert (len(plain), list(plain)) == (5, [2, 3, 4, 5, 6])
    sampler, resumed = (DistributedSamplerWrapper(BatchSampler(ByEpoch(), 2, drop_last=False), 1, 0) for _ in range(2))
    sampler.set_epoch(1)
    assert list(sampler) == [[1, 2], [3, 4]]
    draw_steps([sampler], 1, 1)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == [[3, 4]]


def test_weights_indices_and_sizes_that_change_have_an_effect_from_the_next_pass_on() -> None:
    weighted = WeightedRandomSampler([1.0, 1.0], 40)
    indices = list(range(6))
    batches = BatchSampler(indices, 2, drop_last=False)
    by_weight, by_batch = (DistributedSamplerWrapper[Any](inner, 2, 0) for inner in (weighted, batches))
    for epoch, absent in enumerate((0, 1, 0)):
        for sampler in (by_weight, by_batch):
            sampler.set_epoch(epoch)
        weighted.weights = torch.tensor([float(absent == 1), float(absent == 0)])
        weighted.num_samples += 2
        indices += [6 + 2 * epoch, 7 + 2 * epoch]
        assert (len(by_weight), len(by_batch)) == (21 + epoch, 2 + (epoch + 1) // 2)
        assert list(by_weight) == [1 - absent] * (21 + epoch)
        assert list(by_batch) == [[place, place + 1] for place in range(0, len(indices), 4)]


class Counting(Sampler[int]):
    """Counts its passes. It has no length, or a wrong one."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(torch.randperm(10).tolist())


class Estimating(Counting):
    def __len__(self) -> int:
        return 12


@pytest.mark.parametrize("kind", [Counting, Estimating])
def test_each_pass_is_one_pass_over_the_wrapped_sampler_and_resumes_whatever_length_it_reports(
    kind: type[Counting],
) -> None:
    whole = list(DistributedSamplerWrapper(kind(), 1, 0))
    assert sorted(whole) == list(range(10))
    inner = kind()
    sampler = DistributedSamplerWrapper(inner, 2, 0)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        drawn = iter(sampler)
        assert (inner.passes, len(sampler)) == (epoch + 1, 5)
        assert len(list(drawn)) == 5
    sampler.set_epoch(0)
    draw_steps([sampler], 3, 1)
    resumed = [DistributedSamplerWrapper(kind(), 3, rank, pad=False) for rank in range(3)]
    for one in resumed:
        one.load_state_dict(sampler.state_dict())
        one.set_epoch(0)
    assert in_step_order([list(one) for one in resumed]) == whole[6:]


def test_a_pass_that_resumes_a_sampler_of_another_size_is_an_error() -> None:
    sampler = DistributedSamplerWrapper(range(8), 2, 0)
    draw_steps([sampler], 1, 2)
    resumed = DistributedSamplerWrapper(range(9), 2, 0)
    resumed.load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match="of a sampler of 9 items, but has 8 instead"):
        iter(resumed)
    resumed.set_epoch(1)
    assert list(resumed) == [0, 2, 4, 6, 8]


def test_what_is_already_sharded_is_refused() -> None:
    data: Any = range(8)
    torchs: Any = TorchSampler(data, 2, 0)
    ours = DistributedSamplerWrapper(data, 2, 0)
    split: Any = split_by_rank(data, 2, 0)
    loaders: list[Any] = [
        DataLoader(data, sampler=torchs),
        DataLoader(data, batch_sampler=BatchSampler(ours, 2, drop_last=False)),
        DataLoader(split),
    ]
    refused = "` must yield the samples of all ranks, but is already"
    for sampler in (torchs, ours, split, BatchSampler(torchs, 2, drop_last=False), *loaders):
        for wrap in (DistributedSamplerWrapper, split_by_rank):
            with pytest.raises(ValueError, match=refused):
                wrap(sampler, 2, 0)
    for hidden in (split + split, map(abs, split)):
        with pytest.raises(ValueError, match=refused):
            list(split_by_rank(hidden, 2, 0))


def test_a_dataset_and_its_sampler_may_refer_to_each_other() -> None:
    data: Any = Stream(4)
    inner: Any = Stream(4)
    data.sampler, inner.sampler, inner.dataset = inner, inner, data
    for wrap in (DistributedSamplerWrapper, split_by_rank):
        assert list(wrap(data, 2, 0)) == [0, 2]


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
    splits = [split_by_rank(Stream(23), 2, rank, drop_last) for rank in range(2)]
    shards = [list(map(int, DataLoader(split, batch_size=None, num_workers=2))) for split in splits]
    assert sorted(shards[0] + shards[1]) == list(range(20 if drop_last else 23))
    assert all(item % 2 == rank for rank, shard in enumerate(shards) for item in shard)
    if drop_last:
        assert len(shards[0]) == len(shards[1])


class Restarting(Iterator[int]):
    def __iter__(self) -> Iterator[int]:
        self.items = iter(range(6))
        return self

    def __next__(self) -> int:
        return next(self.items)


class Ending(Restarting):
    items = iter(range(0))

    def __init__(self) -> None:
        super().__iter__()

    def __iter__(self) -> Iterator[int]:
        return self


@pytest.mark.parametrize("drop_last", [False, True])
def test_each_pass_over_an_iterable_is_whole_or_an_error(drop_last: bool) -> None:
    for again in (Restarting(), range(6), Stream(6)):
        split = split_by_rank(again, 2, 0, drop_last)
        assert [list(split) for _ in range(3)] == [[0, 2, 4]] * 3
    text = "`iterable` must be an iterable that starts again in each pass, but is an? "
    for once in (Ending(), (place for place in range(6)), map(int, "012345")):
        split = split_by_rank(once, 2, 0, drop_last)
        assert list(split) == [0, 2, 4]
        with pytest.raises(RuntimeError, match=rf"{text}(\S+\.)?{type(once).__name__} instead"):
            list(split)
    partly = split_by_rank(iter(range(6)), 2, 0, drop_last)
    next(iter(partly))
    with pytest.raises(RuntimeError, match=text):
        list(partly)
    wrapper = DistributedSamplerWrapper(iter(range(6)), 2, 0)
    assert list(wrapper) == [0, 2, 4]
    with pytest.raises(RuntimeError, match="`sampler` must be an iterable that starts again"):
        list(wrapper)


def test_a_generator_that_has_ended_cannot_be_split() -> None:
    list(items := (place for place in range(4)))
    with pytest.raises(RuntimeError, match="but is a generator instead"):
        list(split_by_rank(items, 2, 1))


def test_every_epoch_of_new_workers_reads_a_generator_from_its_start() -> None:
    loader: Any = DataLoader(split_by_rank((place for place in range(9)), 2, 0), batch_size=None, num_workers=2)
    assert [sorted(map(int, loader)) for _ in range(2)] == [[0, 2, 4, 6, 8]] * 2
