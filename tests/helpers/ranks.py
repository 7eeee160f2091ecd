"""What tests compute of the ranks, and whether these still work together."""

from __future__ import annotations

import torch

import dualdist as hvd


def is_last() -> bool:
    return hvd.rank() == hvd.size() - 1


def mean() -> float:
    """Return the mean over the ranks of their numbers from 1."""
    return (hvd.size() + 1) / 2


def check_next_calls_work() -> None:
    assert hvd.allreduce(torch.tensor([hvd.rank() + 1]), op=hvd.Sum).item() == sum(range(1, hvd.size() + 1))
    assert hvd.allreduce(torch.ones(5000), op=hvd.Sum).sum().item() == 5000 * hvd.size()
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
