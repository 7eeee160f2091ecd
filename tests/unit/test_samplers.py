"""DistributedSampler: the samples of each rank in worlds of any size, and the remaining ones after a restart."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler as TorchSampler

from dualdist.errors import NotInitializedError
from dualdist.samplers import DistributedSampler, DistributedSamplerWrapper, split_by_rank

from ..helpers.drawn_samples import draw_steps, in_step_order

lengths, worlds, epochs, flags = st.integers(0, 40), st.integers(1, 6), st.integers(0, 3), st.booleans()
quick = settings(max_examples=30, deadline=None)


@quick
@given(length=lengths, world=worlds, epoch=epochs, shuffle=flags, drop_last=flags)
def test_indices_are_those_of_torch(length: int, world: int, epoch: int, shuffle: bool, drop_last: bool) -> None:
    for rank in range(world):
        ours = DistributedSampler(range(length), world, rank, shuffle, 7, drop_last)
        assert isinstance(ours, TorchSampler)
        data: Any = range(length)
        torchs: Any = TorchSampler(data, world, rank, shuffle, 7, drop_last)
        ours.set_epoch(epoch)
        torchs.set_epoch(epoch)
        assert list(ours) == list(torchs) == list(ours)
        assert all(type(index) is int for index in ours)
        names = ("num_samples", "total_size", "num_replicas", "rank", "epoch", "seed", "shuffle", "drop_last")
        assert [getattr(ours, name) for name in names] == [getattr(torchs, name) for name in names]
        assert len(ours) == len(torchs)


@quick
@given(length=lengths, world=worlds, epoch=epochs)
def test_without_padding_every_sample_occurs_once_in_the_order_of_one_process(
    length: int, world: int, epoch: int
) -> None:
    samplers = [DistributedSampler(range(length), world, rank, seed=3, pad=False) for rank in range(world)]
    (alone,) = [DistributedSampler(range(length), 1, 0, seed=3)]
    for sampler in [*samplers, alone]:
        sampler.set_epoch(epoch)
    shards = [list(sampler) for sampler in samplers]
    assert in_step_order(shards) == list(alone)
    assert sorted(alone) == list(range(length))
    assert [len(sampler) for sampler in samplers] == [len(shard) for shard in shards]
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    # Rank 0 must know when the epoch is over.
    assert len(shards[0]) == max(map(len, shards))


@pytest.mark.parametrize("make", [DistributedSampler, DistributedSamplerWrapper, split_by_rank])
def test_the_world_must_be_known_or_given(make: Any) -> None:
    with pytest.raises(NotInitializedError):
        make(range(4))


def test_drop_last_and_no_padding_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="`pad` must be True with drop_last=True"):
        DistributedSampler(range(4), 2, 0, drop_last=True, pad=False)


@quick
@given(
    length=lengths,
    before=worlds,
    after=worlds,
    epoch=epochs,
    steps=st.integers(0, 12),
    batch=st.integers(1, 4),
    pad=flags,
)
def test_a_resumed_epoch_continues_with_the_samples_that_no_rank_has_seen(
    length: int, before: int, after: int, epoch: int, steps: int, batch: int, pad: bool
) -> None:
    first, second = (
        [DistributedSampler(range(length), world, rank, seed=1, pad=pad) for rank in range(world)]
        for world in (before, after)
    )
    for sampler in first:
        sampler.set_epoch(epoch)
    order = [*DistributedSampler(range(length), 1, 0, seed=1 + epoch)]
    seen = draw_steps(first, steps, batch)[:length]
    assert seen == order[: steps * batch * before]

    for sampler in second:
        sampler.load_state_dict(first[0].state_dict())
        sampler.set_epoch(sampler.epoch)  # as the usual loop does
    left = [list(sampler) for sampler in second]
    assert in_step_order(left)[: length - len(seen)] == order[len(seen) :]
    assert [len(sampler) for sampler in second] == [len(shard) for shard in left]
    if pad:
        assert len({len(shard) for shard in left}) == 1
    else:
        assert sum(map(len, left)) == length - len(seen)

    draw_steps(second, length, batch)
    assert second[0].num_consumed == length
    second[0].set_epoch(epoch + 1)
    assert second[0].num_consumed == 0


@quick
@given(length=lengths, world=worlds, steps=st.integers(0, 12), drop_last=flags)
def test_resuming_in_the_same_world_gives_the_remaining_samples(
    length: int, world: int, steps: int, drop_last: bool
) -> None:
    for rank in range(world):
        sampler = DistributedSampler(range(length), world, rank, drop_last=drop_last)
        whole = list(sampler)
        sampler.set_epoch(0)
        draw_steps([sampler], steps, 1)
        resumed = DistributedSampler(range(length), world, rank, drop_last=drop_last)
        resumed.load_state_dict(sampler.state_dict())
        assert list(resumed) == whole[steps:]


def test_dropped_samples_do_not_return_in_another_world() -> None:
    sampler = DistributedSampler(range(10), 4, 0, drop_last=True)
    draw_steps([sampler], 2, 1)
    resumed = DistributedSampler(range(10), 2, 0, drop_last=True)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == []


def test_the_state_has_its_seed() -> None:
    sampler = DistributedSampler(range(20), 1, 0, seed=4)
    whole = list(sampler)
    draw_steps([sampler], 3, 2)
    resumed = DistributedSampler(range(20), 1, 0, seed=5)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == whole[6:]


def test_a_loaded_offset_applies_to_its_epoch_only() -> None:
    sampler = DistributedSampler(range(20), 1, 0)
    sampler.load_state_dict({"epoch": 2, "seed": 0, "num_consumed": 5, "length": 20, "shuffle": True})
    assert (sampler.epoch, len(sampler)) == (2, 15)
    sampler.set_epoch(2)
    assert len(sampler) == 15
    sampler.set_epoch(3)
    assert len(sampler) == 20
    sampler.set_epoch(2)
    assert len(sampler) == 20


def test_an_epoch_that_was_trained_on_starts_again_when_it_is_set_again() -> None:
    sampler = DistributedSampler(range(6), 2, 0)
    whole = list(sampler)
    for _ in range(2):
        draw_steps([sampler], 1, 2)
        sampler.load_state_dict(sampler.state_dict())
        draw_steps([sampler], 1, 1)
        sampler.set_epoch(0)
        assert list(sampler) == whole


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_that_a_loader_draws_ahead_are_not_lost(num_workers: int) -> None:
    data: Any = list(range(100, 140))
    order = [100 + index for index in DistributedSampler(data, 1, 0)]
    sampler = DistributedSampler(data, 2, 0)
    batches = iter(DataLoader(data, 4, sampler=sampler, num_workers=num_workers))
    for _ in range(2):
        sampler.advance(len(next(batches)))
    state = sampler.state_dict()
    next(batches)  # drawn, and not trained on
    assert state["num_consumed"] == 2 * 4 * 2
    resumed = DistributedSampler(data, 3, 1)
    resumed.load_state_dict(state)
    loader = DataLoader(data, 4, sampler=resumed, num_workers=num_workers)
    assert torch.cat(list(loader)).tolist() == order[16:][1::3]


def test_a_pass_needs_its_epoch_to_be_set_once_samples_are_counted() -> None:
    sampler = DistributedSampler(range(8), 2, 0)
    assert list(sampler) == list(sampler)
    sampler.advance(3)
    with pytest.raises(RuntimeError, match="`set_epoch` must be called before each pass, but 3 samples"):
        iter(sampler)
    sampler.load_state_dict(sampler.state_dict())
    assert len(list(sampler)) == 1


def test_samples_that_were_not_drawn_cannot_be_counted() -> None:
    sampler = DistributedSampler(range(8), 2, 0)
    list(itertools.islice(sampler, 3))
    sampler.advance(1)
    for wrong in (3, -1):
        with pytest.raises(ValueError, match=f"the 2 samples that rank 0 has drawn .* but is {wrong} inst"):
            sampler.advance(wrong)
    sampler.advance(2)


def test_a_loader_that_saves_the_drawn_samples_as_the_position_gets_an_error() -> None:
    # What torchdata's StatefulDataLoader calls, to save and to resume, if the sampler or its iterator has both methods.
    drawn: Any = iter(DistributedSampler(range(8), 2, 0, shuffle=False))
    assert next(drawn) == 0
    for call in (drawn.state_dict, lambda: drawn.load_state_dict({})):
        with pytest.raises(RuntimeError, match="`sampler` must count the drawn samples in a"):
            call()
    assert list(drawn) == [2, 4, 6]


def test_a_state_after_drawing_all_without_counting_is_an_error() -> None:
    sampler = DistributedSampler(range(8), 2, 0)
    assert sampler.state_dict()["num_consumed"] == 0
    list(sampler)
    with pytest.raises(RuntimeError, match="`advance` must be called after each batch, but none of the 4"):
        sampler.state_dict()


def test_other_data_or_another_order_cannot_be_resumed() -> None:
    state = DistributedSampler(range(8), 2, 0).state_dict()
    with pytest.raises(ValueError, match="of a sampler of 9 items, but has 8 instead"):
        DistributedSampler(range(9), 2, 0).load_state_dict(state)
    with pytest.raises(ValueError, match="`shuffle` must be True as in `state_dict`, but is False"):
        DistributedSampler(range(8), 2, 0, shuffle=False).load_state_dict(state)
