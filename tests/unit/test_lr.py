"""Scaled and warmed-up learning rates, compared with plain arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

import dualdist as hvd
from dualdist import lr


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.8)


def rates(scheduler: LRScheduler, steps: int) -> list[float]:
    """Return the learning rate of each step."""
    found = []
    for _ in range(steps):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def test_rates_are_scaled_by_the_rule() -> None:
    assert lr.scaled(0.1, 4) == 0.4
    assert lr.scaled(0.1, 4, rule="sqrt") == 0.2
    assert lr.scaled(0.1, 1) == 0.1


def test_the_factor_is_the_size_of_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(hvd.NotInitializedError):
        lr.scaled(0.1)
    monkeypatch.setattr(lr, "size", lambda: 8)
    assert lr.scaled(0.1) == 0.8
    assert rates(lr.warmup(optimizer(), 2), 3) == pytest.approx([0.1, 0.45, 0.8])


def test_a_warmup_rises_linearly_and_stays() -> None:
    expected = [0.2, 0.35, 0.5, 0.65, 0.8, 0.8]
    assert rates(lr.warmup(optimizer(), 4, 4), 6) == pytest.approx(expected)


def test_what_follows_begins_at_the_end_of_the_warmup() -> None:
    trained = optimizer()
    scheduler = lr.warmup(trained, 4, 4, then=CosineAnnealingLR(trained, T_max=10))
    cosine = [0.4 * (1 + math.cos(math.pi * step / 10)) for step in range(10)]
    assert rates(scheduler, 14) == pytest.approx([0.2, 0.35, 0.5, 0.65, *cosine])


def test_a_warmup_of_no_steps_has_the_full_rate_at_once() -> None:
    trained = optimizer()
    cosine = CosineAnnealingLR(trained, T_max=10)
    assert lr.warmup(trained, 0, 4, then=cosine) is cosine
    assert rates(lr.warmup(optimizer(), 0, 4), 3) == [0.8, 0.8, 0.8]
