"""`check_replicas`: an error that names the tensor and the ranks whose replica differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.ranks import check_next_calls_work
from ..helpers.world import everywhere


def network() -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))
    model.register_buffer("table", torch.eye(3).to_sparse())
    model.register_buffer("mask", torch.tensor([True, False]), persistent=False)
    model.register_buffer("phase", torch.tensor(1 + 2j))
    model.register_buffer("empty", torch.ones(0))
    for number, dtype in enumerate((torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)):
        model.register_parameter(f"p{number}", nn.Parameter(torch.ones(2, 2).to(dtype), requires_grad=False))
    return model


def trained() -> tuple[Any, Any]:
    model = network()
    optimizer = torch.optim.Adam([param for param in model.parameters() if param.requires_grad], lr=0.1)
    model(torch.arange(15.0).reshape(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def swap(model: Any, _: object) -> None:
    model[0].weight.data[[0, 1]] = model[0].weight.data[[1, 0]]


CHANGES: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "a bit": (lambda model, _: model.p0.data[1, 1].add_(1e-15), "'p0' (float64, 2x2)"),
    "an order": (swap, "'0.weight' (float32, 4x3)"),
    "a buffer": (lambda model, _: model.mask.logical_not_(), "'mask' (bool, 2)"),
    "a sparse buffer": (lambda model, _: model.table.mul_(2), "'table' (float32, 3x3)"),
    "a dtype": (lambda model, _: setattr(model, "p3", nn.Parameter(model.p3.float(), False)), "'p3' (int8, 2x2)"),
    "a missing buffer": (lambda model, _: model._buffers.pop("phase"), "'phase' (complex64, a scalar)"),
    "statistics": (lambda model, _: model[1].running_var.add_(1), "'1.running_var' (float32, 4)"),
    "a learning rate": (
        lambda _, optimizer: optimizer.param_groups[0].update(lr=0.2),
        "'optimizer.param_groups[0].lr' (float)",
    ),
    "evaluation": (lambda model, _: model[1].eval(), "'1.training' (bool)"),
    "a frozen parameter": (lambda model, _: model[0].bias.requires_grad_(False), "'0.bias.requires_grad' (bool)"),
    "a moment": (
        lambda _, optimizer: next(iter(optimizer.state.values()))["exp_avg"].add_(1),
        "'optimizer.state[0].exp_avg' (float32, 4x3)",
    ),
}


@everywhere
def test_equal_replicas_pass() -> None:
    model, optimizer = trained()
    hvd.check_replicas(model, optimizer)
    hvd.check_replicas(hvd.DistributedDataParallel(nn.Linear(2, 2)), hvd.DistributedOptimizer(optimizer))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("what", CHANGES)
@everywhere
def test_the_rank_that_differs_is_named(what: str) -> None:
    change, named = CHANGES[what]
    model, optimizer = trained()
    if hvd.rank() == 1:
        change(model, optimizer)
    with pytest.raises(hvd.ReplicaMismatchError) as caught:
        hvd.check_replicas(model, optimizer)
    assert str(caught.value).startswith(f"{named} must be the same on all ranks, but rank 1 of 3 differs")
    check_next_calls_work()


@pytest.mark.ranks(3)
@everywhere
def test_no_rank_is_accused_if_no_two_are_equal() -> None:
    model = network()
    nn.init.constant_(model[0].bias, float(hvd.rank()))
    with pytest.raises(hvd.ReplicaMismatchError, match=r" but it differs between rank 0 and rank 1 and rank 2\."):
        hvd.check_replicas(model)


@pytest.mark.ranks(2, 3)
@everywhere
def test_statistics_of_normalization_can_be_left_out() -> None:
    model, _ = trained()
    model[1].running_mean.fill_(float(hvd.rank()))
    hvd.check_replicas(model, batch_norm_buffers=False)
    model.mask.fill_(hvd.rank() > 0)
    with pytest.raises(hvd.ReplicaMismatchError, match="'mask'"):
        hvd.check_replicas(model, batch_norm_buffers=False)


@pytest.mark.ranks(2)
@everywhere
def test_only_every_so_many_calls_compare() -> None:
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 1.0)
    nn.init.constant_(model.bias, 1.0)
    hvd.check_replicas(model, every=3)
    nn.init.constant_(model.weight, float(hvd.rank()))
    hvd.check_replicas(model, every=3)
    hvd.check_replicas(model, every=3)
    with pytest.raises(hvd.ReplicaMismatchError, match=r"'weight' .* but it differs between rank 0 and rank 1\."):
        hvd.check_replicas(model, every=3)


@everywhere
def test_what_is_no_model_is_an_error() -> None:
    with pytest.raises(TypeError, match="`model` must be a module"):
        hvd.check_replicas({"weight": torch.ones(1)})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`optimizer` must be an optimizer or None, but is 0\.1"):
        hvd.check_replicas(nn.Linear(1, 1), 0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`every` must be"):
        hvd.check_replicas(nn.Linear(1, 1), every=0)
    check_next_calls_work()


@pytest.mark.ranks(2, 3)
@everywhere
def test_what_is_no_optimizer_on_one_rank_is_an_error_on_all() -> None:
    optimizer: Any = 0.1 if hvd.rank() == 0 else None
    kind, text = (TypeError, "") if hvd.rank() == 0 else (hvd.HorovodInternalError, "rank 0 failed .*")
    with pytest.raises(kind, match=f"{text}`optimizer` must be an optimizer or None"):
        hvd.check_replicas(nn.Linear(1, 1), optimizer)
    check_next_calls_work()
