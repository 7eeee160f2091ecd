"""DistributedDataParallel: N ranks with a share of the batch each train as one process with the whole batch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.reference_training import assert_same_weights, batches, loss_of, make_model, share
from ..helpers.world import everywhere


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 1e-4}, {"static_graph": True}])
@everywhere
def test_training_is_that_of_one_process(options: dict[str, Any]) -> None:
    reference = make_model()
    model = make_model()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(hvd.rank())
    wrapped = hvd.DistributedDataParallel(model, **options)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (wrapped, reference)]
    for inputs, targets in batches(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(wrapped, share(inputs), share(targets)).backward()
        loss_of(reference, inputs, targets).backward()
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.grad, expected.grad, rtol=1e-10, atol=1e-10)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_weights(model, reference)


@everywhere
def test_buffers_of_a_part_that_was_added_later_are_those_of_rank_0() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    wrapped = hvd.DistributedDataParallel(model)
    model[1] = nn.BatchNorm1d(2, affine=False, momentum=0.0)
    model[1].running_mean.fill_(float(hvd.rank()))  # type: ignore[operator]
    wrapped(torch.ones(2, 2))
    assert model[1].running_mean.tolist() == [0.0, 0.0]  # type: ignore[operator]


@everywhere
def test_buffers_are_those_of_rank_0_only_in_training() -> None:
    wrapped = hvd.DistributedDataParallel(nn.BatchNorm1d(1, momentum=1.0))
    norm: Any = wrapped.module
    mean = norm.running_mean
    for round_number in (1, 2):
        wrapped(torch.full((2, 1), float(round_number * (hvd.rank() + 1))))
        assert mean.item() == round_number * (hvd.rank() + 1)
    wrapped.eval()
    if hvd.rank() == 0:  # evaluation is not collective
        wrapped(torch.ones(2, 1))
    wrapped.train()
    with torch.no_grad():
        wrapped(torch.ones(2, 1))
    mean.fill_(hvd.rank() + 5.0)
    norm.momentum = 0.0
    wrapped(torch.ones(2, 1))
    assert mean.item() == 5.0


@pytest.mark.ranks(3)
@everywhere
def test_a_process_set_averages_among_its_members() -> None:
    pair = hvd.add_process_set([0, 1])
    model: Any = nn.Linear(1, 1, bias=False)
    wrapped = hvd.DistributedDataParallel(model, process_group=pair)
    wrapped(torch.full((1, 1), float(hvd.rank()))).sum().backward()
    assert model.weight.grad.item() == (0.5 if hvd.rank() < 2 else 2.0)
    hvd.remove_process_set(pair)


@everywhere
def test_two_forwards_with_batch_norm_before_one_backward() -> None:
    wrapped = hvd.DistributedDataParallel(nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)))
    inputs = torch.arange(4.0).view(4, 1)
    (wrapped(inputs).square().sum() + wrapped(inputs + hvd.rank()).square().sum()).backward()
    assert all(param.grad is not None for param in wrapped.parameters())


@pytest.mark.ranks(2, 3)
@everywhere
def test_memory_layouts_that_differ_are_an_error_at_construction() -> None:
    model = nn.Conv2d(2, 2, 3)
    if hvd.rank() == 1:
        model.to(memory_format=torch.channels_last)
    with pytest.raises(hvd.CollectiveMismatchError, match="parameters"):
        hvd.DistributedDataParallel(model)
