"""Hooks of the script on gradients, and scripts that remove all hooks of parameters, those of the wrapper too."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import dualdist as hvd

from ..helpers.styles import distributed, sgd
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
        optimizer = sgd(model, groups=groups, comm_hook=comm_hook)
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
    optimizer = sgd([first, removed, last], op=op, backward_passes_per_step=passes)

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


def remove_hooks(params: Iterable[Any], how: str, taken: list[Any]) -> None:
    for param in params:
        if how in ("cleared", "replaced"):
            param._post_accumulate_grad_hooks.clear()
            if how == "replaced":
                param.register_post_accumulate_grad_hook(lambda _: None)
        else:
            taken.append(param._post_accumulate_grad_hooks)  # somebody may still have it
            param._post_accumulate_grad_hooks = {"none": None, "dict": {}}[how]


@pytest.mark.only_ci(where=lambda world, how: "horovod" in world and how != "cleared")
@pytest.mark.only_ci(where=lambda style, how: style == "sum" and how != "replaced")
@pytest.mark.parametrize("where", ["everywhere", "on rank 0"])
@pytest.mark.parametrize("how", ["cleared", "replaced", "none", "dict"])
@pytest.mark.parametrize("style", ["optimizer", "sum", "module"])
@everywhere
def test_gradients_are_combined_although_a_library_removes_all_hooks(style: str, how: str, where: str) -> None:
    for when, number in itertools.product(("before forward", "before backward", "before step"), (1, 3)):
        params = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(3))
        model = Product(params)
        wrapped = hvd.DistributedDataParallel(model) if style == "module" else model
        optimizer: Any = torch.optim.SGD(params, lr=0.5)
        if style != "module":
            optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Sum if style == "sum" else hvd.Average)
        expected = torch.full((3,), (hvd.size() + 1) / 2 * (hvd.size() if style == "sum" else 1))
        taken: list[Any] = []
        removed: Any = params[:number] if where == "everywhere" or hvd.rank() == 0 else ()
        for step in range(4):
            optimizer.zero_grad()
            if step and when == "before forward":
                remove_hooks(removed, how, taken)
            outputs = wrapped(hvd.rank() + 1.0)["sum"]
            if step and when == "before backward":
                remove_hooks(removed, how, taken)
            outputs.backward()
            found = [param.grad.clone() for param in params]
            if step and when == "before step":
                remove_hooks(removed, how, taken)
            optimizer.step()
            for grad in [*found, *(param.grad for param in params)]:
                torch.testing.assert_close(grad, expected)


@everywhere
def test_what_backward_adds_after_hooks_were_removed_is_combined_by_the_step() -> None:
    params = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
    for number in range(1, 3):
        optimizer.zero_grad()
        sum(param.sum() for param in params).mul(hvd.rank() + 1.0).backward()
        remove_hooks(params, "cleared", [])
        sum(param.sum() for param in params).mul(hvd.rank() + 1.0).backward()
        optimizer.step()
        for param in params:
            torch.testing.assert_close(param.detach(), torch.full((3,), 1.0 - number * (hvd.size() + 1)))


@pytest.mark.parametrize("how", ["cleared", "dict"])
@pytest.mark.parametrize("when", ["in backward", "between backwards"])
@pytest.mark.parametrize("style", ["optimizer", "module"])
@everywhere
def test_hooks_that_are_removed_in_a_backward_or_between_two_are_registered_again(
    style: str, when: str, how: str
) -> None:
    """Also if backward does not reach the last parameter."""
    params = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(4))
    model: Any = Product(params[:3])
    model.last = params[3]
    model, optimizer = distributed(style, model, torch.optim.SGD(params, lr=0.5))
    for step in range(3):
        optimizer.zero_grad()
        model(hvd.rank() + 1.0)["sum"].backward()
        handle = params[1].register_hook(lambda _: remove_hooks(params[:2], how, []))
        if step == 0 or when != "in backward":
            handle.remove()
        if step and when == "between backwards":
            remove_hooks(params, how, [])
        model(hvd.rank() + 1.0)["sum"].backward()
        handle.remove()
        optimizer.step()
        for param in params[:3]:
            torch.testing.assert_close(param.grad, torch.full((3,), hvd.size() + 1.0))


@everywhere
def test_hooks_that_are_removed_before_a_compiled_backward_are_registered_again() -> None:
    params = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(2))
    wrapped = hvd.DistributedDataParallel(Product(params))
    model: Any = torch.compile(wrapped, backend="eager")
    for _ in range(3):
        model.zero_grad()
        output = model(hvd.rank() + 1.0)["sum"]
        remove_hooks(params, "cleared", [])
        output.backward()
        for param in params:
            torch.testing.assert_close(param.grad, torch.full((3,), (hvd.size() + 1) / 2))


class Product(nn.Module):
    """Returns a dictionary, as models of many libraries do."""

    def __init__(self, params: nn.ParameterList) -> None:
        super().__init__()
        self.params = params

    def forward(self, factor: float) -> dict[str, Any]:
        return {"factor": factor, "sum": sum(param.sum() for param in self.params) * factor}
