"""Training with a share of each batch on every rank, beside a reference in this process with the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

import dualdist as hvd

ROWS = 4
"""Rows per rank and step."""


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the whole batches of all ranks."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs = torch.randn(ROWS * hvd.size(), 5, generator=generator, dtype=torch.float64)
        yield inputs, inputs.sin().sum(dim=1, keepdim=True)


def share(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[ROWS * hvd.rank() : ROWS * (hvd.rank() + 1)]


def loss_of(model: Callable[..., torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (model(inputs) - targets).square().mean()


def assert_same_weights(model: nn.Module, reference: nn.Module, rtol: float = 1e-10) -> None:
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        label: Any = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(param, expected, rtol=rtol, atol=rtol, msg=label)


def train_beside(
    given: Iterable[tuple[torch.Tensor, torch.Tensor]],
    model: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    reference: Callable[[torch.Tensor], torch.Tensor],
    alone: torch.optim.Optimizer,
    *,
    set_to_none: bool = True,
    zeroes: Any = None,
) -> None:
    """Train a model with this rank's share of each batch, and a reference with the whole batch in this process.

    zeroes: the module that sets the gradients to zero. None: the optimizer does.
    """
    for inputs, targets in given:
        (zeroes or optimizer).zero_grad(set_to_none)
        loss_of(model, share(inputs), share(targets)).backward()
        optimizer.step()
        alone.zero_grad()
        loss_of(reference, inputs, targets).backward()
        alone.step()


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9),
}


def check_training(
    make: Make,
    steps: int = 3,
    set_to_none: bool = True,
    zero_with_model: bool = False,
    rtol: float = 1e-10,
    **options: Any,
) -> None:
    """Train with a share of each batch, and with the whole batch in this process alone; the weights must be equal."""
    model, reference = make_model(), make_model()
    if "groups" in options and not isinstance(options["groups"], int):
        params = list(model.parameters())
        options["groups"] = [[params[place] for place in group] for group in options["groups"]]
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)
    alone = make(reference.parameters())
    zeroes = model if zero_with_model else None
    train_beside(batches(steps), model, optimizer, reference, alone, set_to_none=set_to_none, zeroes=zeroes)
    assert_same_weights(model, reference, rtol)
