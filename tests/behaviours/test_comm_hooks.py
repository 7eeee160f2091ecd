"""Communication hooks of torch's DistributedDataParallel, on every backend and in both styles."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

import dualdist as hvd

from ..helpers.world import everywhere

STEPS = 20


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> list[torch.Tensor]:
    """Train on data that differs between the ranks; return the weights."""
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(6, 8, generator=generator)
        (model(inputs) - inputs[:, :4]).square().mean().backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def check_equal_on_all_ranks(weights: list[torch.Tensor]) -> None:
    for weight in weights:
        rows = hvd.allgather(weight.reshape(1, -1))
        assert torch.equal(rows, rows[:1].expand_as(rows))


def power_sgd(group: Any, **options: Any) -> Any:
    return powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5, **options
    )


def plain_power_sgd(group: Any) -> Any:
    return power_sgd(group, warm_start=False, use_error_feedback=False)


def post_local_sgd(group: Any) -> Any:
    return post_localSGD_hook.PostLocalSGDState(group, None, 5, post_local_gradient_allreduce=False)


def itself(group: Any) -> Any:
    return group


HOOKS: dict[str, tuple[Callable[[Any], Any], Callable[..., Any]]] = {
    "allreduce": (itself, default_hooks.allreduce_hook),
    "fp16": (itself, default_hooks.fp16_compress_hook),
    "fp16 wrapper": (power_sgd, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
    "PowerSGD": (power_sgd, powerSGD_hook.powerSGD_hook),
    "plain PowerSGD": (plain_power_sgd, powerSGD_hook.powerSGD_hook),
    "quantization per tensor": (itself, quantization_hooks.quantization_pertensor_hook),
    "noop": (itself, noop_hook),
    "post-local SGD": (post_local_sgd, post_localSGD_hook.post_localSGD_hook),
}
"""name -> (function that makes the state for a process group, None for the default group; hook)"""


@functools.cache
def gloo_group() -> Any:
    """Return a group of all ranks. It is kept: a callback of a hook may hold it in a thread of gloo, which must not
    destroy it."""
    return dist.new_group(backend="gloo")


def torch_weights(make_state: Callable[[Any], Any], hook: Callable[..., Any]) -> list[torch.Tensor]:
    """Train by torch's DistributedDataParallel over gloo."""
    model = nn.parallel.DistributedDataParallel(network(), process_group=gloo_group())
    model.register_comm_hook(make_state(gloo_group()), hook)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("style", ["module", "optimizer"])
@pytest.mark.parametrize("name", HOOKS)
@everywhere
def test_hooks_of_torch_give_the_numbers_of_torch(name: str, style: str) -> None:
    make_state, hook = HOOKS[name]
    model = network()
    if style == "module":
        wrapped = hvd.DistributedDataParallel(model)
        wrapped.register_comm_hook(make_state(None), hook)
        weights = train(wrapped, torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), comm_hook=(make_state(None), hook)
        )
        weights = train(model, optimizer)
    for ours, theirs in zip(weights, torch_weights(make_state, hook), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    if name not in ("noop", "post-local SGD"):
        check_equal_on_all_ranks(weights)
