"""Commits of elastic training keep a copy of the state in host memory, not on the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dualdist import accelerator
from dualdist.elastic.state import ModelStateHandler, OptimizerStateHandler


def test_tensors_on_a_device_are_copied_to_the_host_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = [param.detach().clone() for param in model.parameters()]
    moment = optimizer.state[model.weight]["exp_avg"].clone()
    with monkeypatch.context() as patch:
        # A double of a device: its tensors are on the CPU, and none may be copied where it is.
        patch.setattr(accelerator, "has_streams", lambda tensor: True)
        patch.setattr(torch.Tensor, "__deepcopy__", None)
        handlers = [ModelStateHandler(model), OptimizerStateHandler(optimizer)]
    optimizer.step()
    for handler in handlers:
        handler.restore()
    for param, saved in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.detach(), saved)
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], moment)
