"""torch.compile of the wrapped model trains as one process does, in both styles."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.reference_training import assert_same_weights, batches, train_beside
from ..helpers.world import everywhere
from .test_wrong_use import STYLES


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


@pytest.mark.ranks(2)
@pytest.mark.world_kinds("torch-gloo", "horovod-gloo")  # seconds each, and the transport does not matter
@pytest.mark.parametrize("style", STYLES)
@everywhere
def test_a_compiled_model_trains_as_one_process_does(style: str) -> None:
    torch.compiler.reset()
    model, reference = hvd.SyncBatchNorm.convert_sync_batchnorm(make_model()), make_model()
    wrapped, optimizer = STYLES[style](model)
    compiled = torch.compile(wrapped, backend="aot_eager")
    alone = torch.optim.SGD(reference.parameters(), lr=1.0)
    train_beside(batches(3), compiled, optimizer, reference, alone)
    assert_same_weights(model, reference)
