"""torch.utils.checkpoint: layers whose activations backward computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dualdist as hvd

from ..helpers.reference_training import assert_same_weights, batches, make_model, train_beside
from ..helpers.styles import distributed, sgd
from ..helpers.world import everywhere


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@everywhere
def test_checkpointed_parts_train_as_one_process_does(reentrant: bool) -> None:
    model, reference = make_model(), make_model()

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        hidden = model[1](model[0](inputs))
        for part in (model[2:4], model[4:]):
            hidden = checkpoint(part, hidden, use_reentrant=reentrant)
        return hidden  # type: ignore[no-any-return]

    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    alone = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    train_beside(batches(3), forward, optimizer, reference, alone)
    assert_same_weights(model, reference)


@pytest.mark.parametrize("is_used_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@everywhere
def test_a_layer_that_is_used_in_checkpointed_parts_and_outside(
    reentrant: bool, set_to_none: bool, is_used_before: bool
) -> None:
    model, reference = make_model(), make_model()

    def through(network: Any, keep: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        first, inner, *last = network[0], network[2], network[4:]

        def part(hidden: torch.Tensor) -> torch.Tensor:
            return inner(hidden).tanh()  # type: ignore[no-any-return]

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            hidden = first(inputs)
            # If it is not, backward completes the layer's own gradient before that of the checkpointed parts.
            if is_used_before:
                hidden = part(hidden)
            for _ in range(2):
                hidden = part(hidden) if keep else checkpoint(part, hidden, use_reentrant=reentrant)
            return nn.Sequential(*last)(part(hidden))  # type: ignore[no-any-return]

        return forward

    optimizer = sgd(model.parameters(), lr=0.1, momentum=0.9, groups=[[param] for param in model.parameters()])
    alone = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    networks = through(model, keep=False), through(reference, keep=True)
    train_beside(batches(4), networks[0], optimizer, networks[1], alone, set_to_none=set_to_none)
    assert_same_weights(model, reference)


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_layer_that_repeats_while_ranks_use_different_others() -> None:
    torch.manual_seed(0)
    layers: Any = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("first", "shared", "some", "last")})
    optimizer = sgd(layers.parameters(), groups=[[param] for param in layers.parameters()])

    def loss(rank: int, use_reentrant: bool = False) -> torch.Tensor:
        hidden = layers["first"](torch.full((1, 2), rank + 1.0))
        hidden = checkpoint(layers["shared"], hidden, use_reentrant=use_reentrant)
        hidden = layers["shared"](hidden).tanh()
        if rank > 0:  # so that rank 0 has sent fewer buckets when the gradient of "shared" is completed again
            hidden = layers["some"](hidden)
        return layers["last"](hidden).sum()  # type: ignore[no-any-return]

    params = list(layers.parameters())
    for _ in range(2):
        mean = torch.stack([loss(rank) for rank in range(hvd.size())]).mean()
        expected = torch.autograd.grad(mean, params)
        optimizer.zero_grad()
        loss(hvd.rank(), use_reentrant=True).backward()
        torch.testing.assert_close([param.grad for param in params], list(expected))


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
@pytest.mark.parametrize("with_head", [True, False])
@everywhere
def test_gradients_are_complete_after_the_last_pass_of_reentrant_checkpoints(op: int, with_head: bool) -> None:
    """The ends of nested backwards must not combine what layers before them have not completed."""
    first, inside, head = (nn.Parameter(torch.ones(1)) for _ in range(3))
    params = [first, inside, *([head] if with_head else [])]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), op=op, backward_passes_per_step=2)
    total = sum(range(1, hvd.size() + 1)) / (1 if op == hvd.Sum else hvd.size())
    for _ in range(3):
        optimizer.zero_grad()
        for passes in (1, 2):
            hidden = checkpoint(lambda x: x + inside, first * 1.0, use_reentrant=True)
            (hidden + head if with_head else hidden).mul(hvd.rank() + 1.0).sum().backward()
            expected = hvd.rank() + 1 if passes == 1 else 2 * total
            for param in params:
                assert param.grad is not None and param.grad.item() == pytest.approx(expected)
        optimizer.step()


@pytest.mark.parametrize("style", ["optimizer", "module"])
@pytest.mark.ranks(2, 3)
@everywhere
def test_only_some_ranks_may_reach_a_reentrant_checkpoint(style: str) -> None:
    params = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(3))
    first, inside, head = params
    wrapped, optimizer = distributed(style, params, torch.optim.SGD(params, lr=1.0))
    mean = (hvd.size() + 1) / 2
    for _ in range(4):
        optimizer.zero_grad()
        hidden = first * 1.0
        if hvd.rank() == 0:
            hidden = checkpoint(lambda x: x + inside, hidden, use_reentrant=True)
        (hidden + head).mul(hvd.rank() + 1.0).sum().backward()
        expected = (mean, 1 / hvd.size(), mean)
        for param, value in zip(params, expected, strict=True):
            assert param.grad is not None and param.grad.item() == pytest.approx(value)
    assert wrapped is not None
