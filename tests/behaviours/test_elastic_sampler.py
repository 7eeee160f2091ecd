"""Elastic samplers continue where the last commit was."""

from __future__ import annotations

from typing import Any

import dualdist as hvd
from dualdist.elastic import ElasticSampler, TorchState, run

from ..helpers.collected_warnings import warned
from ..helpers.world import everywhere


@everywhere
def test_a_sampler_without_set_epoch_is_warned_about_once_on_rank_0() -> None:
    sampler = ElasticSampler(range(5))
    with warned() as messages:
        for batch in range(3 * len(sampler)):
            sampler.record_batch(batch, 1)
    assert len(messages) == (1 if hvd.rank() == 0 else 0)
    assert all("all 5 samples of epoch 0" in message for message in messages)
    with warned() as messages:
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for batch in range(len(sampler)):
                sampler.record_batch(batch, 1)
    assert not messages


@everywhere
def test_a_sampler_continues_at_the_commit() -> None:
    seen: list[int] = []
    lost = [2 * hvd.size() + hvd.rank()]

    @run
    def train(state: Any) -> None:
        for place, index in enumerate(state.sampler):
            seen.append(index)
            state.sampler.record_batch(place, 1)
            if len(seen) == 2:
                state.commit()
            if len(seen) == 3 and lost:
                seen.remove(lost.pop())
                raise hvd.HorovodInternalError("lost a rank")

    state = TorchState(sampler=ElasticSampler(range(4 * hvd.size()), shuffle=False))
    with warned():
        train(state)
    assert sorted(index for ranks in hvd.allgather_object(seen) for index in ranks) == list(range(4 * hvd.size()))
