"""A training with an elastic state, and the weight that it must reach."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

import dualdist as hvd
from dualdist.elastic import StateHandler, TorchState, get_handler_registry, set_handler_registry

BATCHES = 6
RATE, MOMENTUM = 0.5, 0.5


def slope(batch: int) -> float:
    """Return this rank's gradient of the weight."""
    return float((batch + 1) * (hvd.rank() + 1))


def weight_after(batches: int) -> float:
    """Return the weight after training, by plain arithmetic."""
    weight = velocity = 0.0
    for batch in range(batches):
        velocity = MOMENTUM * velocity + sum((batch + 1) * (rank + 1) for rank in range(hvd.size())) / hvd.size()
        weight -= RATE * velocity
    return weight


def make_state(**values: Any) -> Any:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM))
    return TorchState(model, optimizer, **values)


def train_batch(state: Any) -> None:
    state.optimizer.zero_grad()
    (state.model.weight * slope(state.batch)).sum().backward()
    state.optimizer.step()
    state.batch += 1


def weight(state: Any) -> float:
    return float(state.model.weight.item())


@contextlib.contextmanager
def handled(kind: type, handler: type[StateHandler]) -> Iterator[None]:
    """Let elastic states handle objects of `kind` by `handler` in the `with` block."""
    before = get_handler_registry()
    set_handler_registry([(kind, handler), *before])
    try:
        yield
    finally:
        set_handler_registry(before)
