"""seed_everything and the seeding of data workers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import dualdist as hvd
from dualdist import seeding


def numbers() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), torch.rand(()).item()


def test_equal_seeds_give_equal_numbers_from_every_generator() -> None:
    assert hvd.seed_everything(3) == 3
    drawn = numbers()
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    assert drawn == numbers()
    assert hvd.seed_everything(2**32 - 1) == 2**32 - 1
    assert all(mine != other for mine, other in zip(numbers(), drawn, strict=True))


@pytest.mark.parametrize(("rank_offset", "expected"), [(False, 7), (0, 7), (True, 9), (1000, 2007)])
def test_each_rank_gets_the_seed_of_its_offset(
    rank_offset: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeding, "rank", lambda: 2)
    monkeypatch.setattr(seeding, "size", lambda: 4)
    assert hvd.seed_everything(7, rank_offset=rank_offset) == expected
    assert torch.initial_seed() == expected


@pytest.mark.parametrize(("seed", "rank_offset"), [(-1, 0), (2**32, 0), (2**32 - 3, 1)])
def test_a_seed_out_of_range_on_any_rank_is_an_error_on_all(
    seed: int, rank_offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeding, "size", lambda: 4)
    for rank in range(4):
        monkeypatch.setattr(seeding, "rank", lambda rank=rank: rank)
        with pytest.raises(ValueError, match=rf"2\*\*32 on every rank, but is {seed} with rank_offset"):
            hvd.seed_everything(seed, rank_offset=rank_offset)


def test_an_offset_needs_a_world() -> None:
    with pytest.raises(hvd.NotInitializedError):
        hvd.seed_everything(1, rank_offset=True)


class Noise(torch.utils.data.Dataset[list[float]]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> list[float]:
        return list(numbers())


def drawn_by_workers(rank: int) -> list[float]:
    """Return the numbers that the two workers of `rank` draw from each generator; all ranks have the same seed."""
    torch.manual_seed(1)
    init: Any = seeding.worker_init_fn(rank)
    loader: Any = DataLoader(Noise(), batch_size=None, num_workers=2, worker_init_fn=init)
    return [float(number) for sample in loader for number in sample]


def test_workers_draw_other_numbers_on_other_ranks_and_the_same_again() -> None:
    first = drawn_by_workers(0)
    assert len({*first, *drawn_by_workers(1)}) == 2 * 2 * 3
    assert drawn_by_workers(0) == first
