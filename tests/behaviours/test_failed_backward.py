"""A backward that raises leaves the next step right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.reference_training import (
    assert_same_weights,
    batches,
    loss_of,
    make_model,
    share,
    train_beside,
)
from ..helpers.world import everywhere


@pytest.mark.ranks(2, 3)
@everywhere
def test_an_exception_in_backward_leaves_the_next_step_right() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            raise ArithmeticError("on purpose")

    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=1.0))
    with pytest.raises(ArithmeticError):
        (Fails.apply(first) + second).sum().backward()
    optimizer.zero_grad()
    ((first + second) * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    assert (first.item(), second.item()) == pytest.approx([-(hvd.size() + 1) / 2] * 2)


@everywhere
def test_a_backward_that_failed_on_every_rank_can_be_repeated() -> None:
    model, reference = make_model(), make_model()
    wrapped = hvd.DistributedDataParallel(model, bucket_cap_mb=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    alone = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)

    def fail(*_: object) -> None:
        raise MemoryError

    for inputs, targets in batches(3):
        hook = model[2].register_full_backward_hook(fail)  # the last layer's gradients are under way by then
        with pytest.raises(MemoryError):
            loss_of(wrapped, share(inputs), share(targets)).backward()
        hook.remove()
        train_beside([(inputs, targets)], wrapped, optimizer, reference, alone)
    assert_same_weights(model, reference)
