"""allreduce: values."""

from __future__ import annotations

import pytest
import torch

import dualdist as hvd

from ..world import everywhere


@everywhere
def test_average_divides_the_sum_by_the_number_of_ranks() -> None:
    tensor = torch.tensor([1.0, 2.0]) * (hvd.rank() + 1)
    mean = sum(range(1, hvd.size() + 1)) / hvd.size()
    assert hvd.allreduce(tensor).tolist() == [mean, 2 * mean]
