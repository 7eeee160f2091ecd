"""torch.compile of models, of whole steps and of functions with collectives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.reference_training import assert_same_weights, batches, loss_of, share, train_beside
from ..helpers.world import everywhere
from .test_wrong_use import STYLES


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


@pytest.mark.ranks(2)
@pytest.mark.world_kinds("torch-gloo", "horovod-gloo")  # seconds each, and the transport does not matter
@pytest.mark.parametrize("style", STYLES)
@everywhere
def test_a_compiled_model_trains_as_one_process_does(style: str) -> None:
    torch.compiler.reset()
    model, reference = hvd.SyncBatchNorm.convert_sync_batchnorm(make_model()), make_model()
    wrapped, optimizer = STYLES[style](model)
    compiled = torch.compile(wrapped, backend="aot_eager")
    alone = torch.optim.SGD(reference.parameters(), lr=1.0)
    train_beside(batches(3), compiled, optimizer, reference, alone)
    assert_same_weights(model, reference)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` for the first time, and without a warning that torch hides, but not from a test."""
    torch.compiler.reset()
    made = torch.compile(function, backend="aot_eager")

    def run(*args: torch.Tensor) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning
            )
            return made(*args)

    return run


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", STYLES)
@everywhere
def test_a_compiled_backward_combines_gradients(style: str) -> None:
    """Then autograd calls dualdist while a compiled function runs, in which torch compiles all that is called."""
    model, reference = hvd.SyncBatchNorm.convert_sync_batchnorm(make_model()), make_model()
    wrapped, optimizer = STYLES[style](model)
    alone = torch.optim.SGD(reference.parameters(), lr=1.0)

    @compiled
    def backward(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        loss_of(wrapped, inputs, targets).backward()

    for inputs, targets in batches(3):
        optimizer.zero_grad()
        backward(share(inputs), share(targets))
        alone.zero_grad()
        loss_of(reference, inputs, targets).backward()
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.grad, expected.grad, rtol=1e-9, atol=1e-9)
        optimizer.step()
        alone.step()
    assert_same_weights(model, reference)


@pytest.mark.ranks(2)
@pytest.mark.world_kinds("torch-gloo", "horovod-gloo")
@pytest.mark.parametrize("style", STYLES)
@everywhere
def test_compiled_autograd_is_refused_and_training_without_it_continues(style: str) -> None:
    torch.manual_seed(0)
    model, reference = nn.Linear(5, 1).double(), nn.Linear(5, 1).double()
    reference.load_state_dict(model.state_dict())
    wrapped, optimizer = STYLES[style](model)
    alone = torch.optim.SGD(reference.parameters(), lr=1.0)
    train_beside(batches(2), wrapped, optimizer, reference, alone)
    with torch._dynamo.config.patch(compiled_autograd=True):
        # compiled() must be inside: torch.compile reads the setting
        backward = compiled(lambda inputs, targets: loss_of(wrapped, inputs, targets).backward())
        for inputs, targets in batches(1):
            with pytest.raises(RuntimeError, match="Compiled autograd must be off"):
                backward(share(inputs), share(targets))
    train_beside(batches(2), wrapped, optimizer, reference, alone)
    assert_same_weights(model, reference)


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "allreduce": (lambda x: hvd.allreduce(2 * x, op=hvd.Sum) + 1, lambda xs: 2 * sum(xs) + 1),
    "grouped_allreduce": (
        lambda x: hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)[1] + 1,
        lambda xs: 2 * sum(xs) + 1,
    ),
    "allgather": (lambda x: hvd.allgather(2 * x) + 1, lambda xs: 2 * torch.cat(xs) + 1),
    "broadcast": (lambda x: hvd.broadcast(2 * x, 1) + 1, lambda xs: 2 * xs[1] + 1),
    "reducescatter": (
        lambda x: hvd.reducescatter(2 * x, op=hvd.Sum) + 1,
        lambda xs: 2 * sum(x.view(2, 2)[hvd.rank()] for x in xs) + 1,
    ),
    "alltoall": (
        lambda x: hvd.alltoall(2 * x, [2, 2])[0] + 1,
        lambda xs: 2 * torch.cat([x.view(2, 2)[hvd.rank()] for x in xs]) + 1,
    ),
    "asynchronous": (
        lambda x: hvd.synchronize(hvd.allreduce_async(2 * x, op=hvd.Sum)) + 1,
        lambda xs: 2 * sum(xs) + 1,
    ),
    "object": (lambda x: x * hvd.broadcast_object(7 + hvd.rank(), 1), lambda xs: 8 * xs[hvd.rank()]),
}
"""A function to compile, and the result from the inputs of both ranks."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CALLS)
@everywhere
def test_a_compiled_function_may_call_collectives(name: str) -> None:
    function, expect = CALLS[name]
    run = compiled(function)
    for step in range(3):
        inputs = [torch.arange(4.0) + 10 * rank + step for rank in range(2)]
        torch.testing.assert_close(run(inputs[hvd.rank()]), expect(inputs))


@pytest.mark.ranks(2)
@everywhere
def test_a_collective_in_a_compiled_function_has_a_gradient() -> None:
    @compiled
    def gradient(scale: torch.Tensor) -> torch.Tensor | None:
        weight = torch.ones(3, requires_grad=True)
        hvd.allreduce(weight * scale, op=hvd.Sum).sum().backward()
        return weight.grad

    scale = torch.arange(3.0) + hvd.rank()
    torch.testing.assert_close(gradient(scale), 2 * scale)  # the sum of the gradients of both ranks: of ones
