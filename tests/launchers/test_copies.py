"""A pickled wrapper in a process that has joined no world."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd


def pickled_wrapper() -> bytes:
    hvd.init()
    return pickle.dumps(hvd.DistributedDataParallel(nn.Linear(1, 1)))


@pytest.mark.usefixtures("python")
def test_a_copy_evaluates_without_a_world_and_does_not_train_alone() -> None:
    (data,) = hvd.spawn(pickled_wrapper, nprocs=1, timeout=100)
    made: Any = pickle.loads(data)
    with torch.no_grad():
        assert made(torch.ones(1, 1)).shape == (1, 1)
    loss = made(torch.ones(1, 1)).sum()
    with pytest.raises(hvd.NotInitializedError, match=r"call dualdist\.init\(\) first"):
        loss.backward()
