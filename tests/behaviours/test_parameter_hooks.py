"""Hooks that change the gradient of a parameter: the ranks combine what they have made of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import dualdist as hvd

from ..helpers.world import everywhere


@pytest.mark.parametrize("comm_hook", [None, allreduce_hook], ids=["none", "allreduce"])
@pytest.mark.parametrize("style", ["optimizer", "module"])
@pytest.mark.ranks(2, 3)
@everywhere
def test_a_hook_changes_the_gradient_before_it_is_combined(style: str, comm_hook: Any) -> None:
    model: Any = nn.ParameterList(nn.Parameter(torch.zeros(500)) for _ in range(4))
    before, *after = model

    def clip(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.clamp_(max=1.5)

    before.register_post_accumulate_grad_hook(clip)
    if style == "module":
        wrapped = hvd.DistributedDataParallel(model, bucket_cap_mb=1e-3)
        if comm_hook is not None:
            wrapped.register_comm_hook(None, comm_hook)
    else:
        groups = [[param] for param in model]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model, lr=1.0), groups=groups, comm_hook=comm_hook
        )
    for param in after:
        param.register_post_accumulate_grad_hook(clip)
    for _ in range(3):
        model.zero_grad()
        sum(param.sum() for param in model).mul(hvd.rank() + 1.0).backward()
        mean = (1.0 + 1.5 * (hvd.size() - 1)) / hvd.size()
        for param in model:
            torch.testing.assert_close(param.grad, torch.full((500,), mean))
    if style == "optimizer":
        optimizer.step()
        assert all(bool((param == -param.grad).all()) for param in model)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=["sum", "average"])
@everywhere
def test_a_hook_that_removes_the_gradient_leaves_the_others_right(op: int, passes: int) -> None:
    first, removed, last = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([first, removed, last], lr=1.0), op=op, backward_passes_per_step=passes
    )

    def remove(param: torch.Tensor) -> None:
        param.grad = None

    removed.register_post_accumulate_grad_hook(remove)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(passes):
            (first + removed + last).sum().backward()
        optimizer.step()
    total = 2.0 * passes * (hvd.size() if op == hvd.Sum else 1)
    for param, expected in ((first, -total), (removed, 0.0), (last, -total)):
        torch.testing.assert_close(param.detach(), torch.full((3,), expected))
