"""The two styles in which ranks train together, and the optimizer of most tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import dualdist as hvd

STYLES = ("optimizer", "module")


def distributed(style: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Wrap the model or the optimizer, and return both. Collective for a model."""
    if style == "module":
        return hvd.DistributedDataParallel(model), optimizer
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters())


def sgd(params: Any, lr: float = 1.0, momentum: float = 0.0, **options: Any) -> hvd.SynchronizedOptimizer:
    """Return a distributed SGD. options: of DistributedOptimizer."""
    return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=lr, momentum=momentum), **options)


def step(optimizer: torch.optim.Optimizer, *params: torch.Tensor) -> None:
    """Take a step in which the gradient of each parameter is this rank's number, from 1."""
    optimizer.zero_grad()
    torch.stack([param.sum() for param in params]).sum().mul(hvd.rank() + 1.0).backward()
    optimizer.step()
