"""ElasticSampler: the indices of each rank, compared with plain lists."""

from __future__ import annotations

import random

import pytest

from dualdist import samplers
from dualdist.elastic import ElasticSampler


def shards(
    monkeypatch: pytest.MonkeyPatch, length: int, size: int, processed: int = 0, epoch: int = 0, shuffle: bool = False
) -> list[list[int]]:
    """Return the indices of every rank."""
    monkeypatch.setattr(samplers, "size", lambda: size)
    drawn = []
    for rank in range(size):
        monkeypatch.setattr(samplers, "own_rank", lambda rank=rank: rank)
        made = ElasticSampler(range(length), shuffle=shuffle, seed=7)
        made.load_state_dict({"epoch": epoch, "processed_num": processed})
        drawn.append(list(made))
        assert len(made) == len(drawn[-1])
    return drawn


def test_ranks_take_turns_and_repeat_the_first_samples_until_all_have_the_same_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert shards(monkeypatch, 6, 2) == [[0, 2, 4], [1, 3, 5]]
    assert shards(monkeypatch, 5, 3) == [[0, 3], [1, 4], [2, 0]]
    assert shards(monkeypatch, 1, 4) == [[0], [0], [0], [0]]


def test_processed_samples_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shards(monkeypatch, 10, 2, processed=4) == [[4, 6, 8], [5, 7, 9]]
    assert shards(monkeypatch, 10, 3, processed=4) == [[4, 7], [5, 8], [6, 9]]
    assert shards(monkeypatch, 10, 2, processed=10) == [[], []]


@pytest.mark.parametrize("epoch", [0, 3])
def test_shuffling_is_as_in_horovod(epoch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    order = list(range(10))
    random.Random(7 + epoch).shuffle(order)
    assert shards(monkeypatch, 10, 2, 4, epoch, shuffle=True) == [order[4::2], order[5::2]]


def test_record_batch_counts_the_batches_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "size", lambda: 3)
    monkeypatch.setattr(samplers, "own_rank", lambda: 1)
    made = ElasticSampler(range(100))
    for batch in range(4):
        made.record_batch(batch, 5)
    assert made.state_dict() == {"epoch": 0, "processed_num": 60}
    assert len(made) == 34
    made.reset()
    assert len(made) == 14
    made.set_epoch(1)
    assert made.state_dict() == {"epoch": 1, "processed_num": 0}
    assert len(made) == 34
