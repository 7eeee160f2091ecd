"""A backward that raises leaves the next step right."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import dualdist as hvd

from ..helpers.files import wait_for
from ..helpers.ranks import check_next_calls_work
from ..helpers.rejoining import outside_world, rejoin
from ..helpers.styles import sgd
from ..helpers.world import everywhere


def fail(*_: object) -> None:
    raise MemoryError


@pytest.mark.ranks(2, 3)
@everywhere
def test_an_exception_in_the_first_backward_leaves_the_next_step_right() -> None:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=1.0))
    hook = first.register_hook(fail)
    with pytest.raises(MemoryError):
        (first + second).sum().backward()
    hook.remove()
    optimizer.zero_grad()
    ((first + second) * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    assert (first.item(), second.item()) == pytest.approx([-(hvd.size() + 1) / 2] * 2)


@pytest.mark.not_on_devices(where=lambda comm_hook: comm_hook is not None)  # over gloo, torch has no npu
@pytest.mark.parametrize("comm_hook", [None, allreduce_hook], ids=["none", "allreduce"])
@everywhere
def test_what_a_failed_backward_has_sent_does_not_become_the_gradients_of_another(comm_hook: Any) -> None:
    model: Any = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    optimizer = sgd(model.parameters(), groups=[[param] for param in model.parameters()], comm_hook=comm_hook)
    inputs = torch.full((1, 2), hvd.rank() + 1.0)

    for _ in range(2):
        optimizer.zero_grad()
        (model[0](inputs) + model[1](inputs)).sum().backward()
    optimizer.zero_grad()
    hook = model[1][0].register_full_backward_hook(fail)
    with pytest.raises(MemoryError):
        model[1](inputs.requires_grad_()).sum().backward()
    hook.remove()
    optimizer.zero_grad()
    model[0](inputs).sum().backward()
    assert all(param.grad is None for param in model[1].parameters())
    mean = (hvd.size() + 1) / 2
    expected = torch.autograd.grad(model[0](torch.full((1, 2), mean)).sum(), list(model[0].parameters()))
    torch.testing.assert_close([param.grad for param in model[0].parameters()], list(expected))
    check_next_calls_work()


@pytest.mark.parametrize("between", ["no_sync", "passes"])
@everywhere
def test_what_a_failed_backward_has_sent_is_forgotten_also_after_a_change_of_what_is_combined(between: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrapped: Any = model
    if between == "no_sync":
        wrapped = hvd.DistributedDataParallel(model, bucket_cap_mb=1e-5)
    else:
        optimizer = sgd(model.parameters(), groups=[[param] for param in model.parameters()])

    def backward(loss_scale: float = 1.0) -> None:
        (loss_scale * wrapped(torch.full((1, 2), hvd.rank() + 1.0))).sum().backward()

    for _ in range(2):
        model.zero_grad()
        backward()
    hook = model[0].register_full_backward_pre_hook(fail)
    model.zero_grad()
    with pytest.raises(MemoryError):
        backward(100.0)
    hook.remove()
    model.zero_grad()
    num_backwards = 1
    if between == "no_sync":
        with wrapped.no_sync():
            backward()
        num_backwards = 2
    else:
        optimizer.set_backward_passes_per_step(1)
    backward()
    mean = torch.full((1, 2), (hvd.size() + 1) / 2)
    expected = torch.autograd.grad(num_backwards * model(mean).sum(), list(model.parameters()))
    torch.testing.assert_close([param.grad for param in model.parameters()], list(expected))
    check_next_calls_work()


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_backward_after_a_rank_has_left_names_it(tmp_path: Path) -> None:
    weight, rank, last = nn.Parameter(torch.zeros(3)), hvd.rank(), hvd.size() - 1
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    ended = [tmp_path / str(rank) for rank in range(hvd.size())]
    with outside_world() if rank == last else contextlib.nullcontext():
        if rank == last:
            ended[last].touch()
        else:
            wait_for([ended[last]])
            optimizer.zero_grad()
            named = rf"(?s)missing ranks: \[{last}\].*rank {last}: process ended, or called shutdown"
            with pytest.raises(hvd.HorovodInternalError, match=named):
                weight.sum().backward()
            ended[rank].touch()
            wait_for(ended)
            rejoin()
        wait_for(ended)
    check_next_calls_work()
