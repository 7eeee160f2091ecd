"""torch.compile of models, of whole steps and of functions with collectives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel

import dualdist as hvd
from dualdist.core.compiling import CAN_SPLIT_GRAPHS

from ..helpers.public_functions import COLLECTIVES
from ..helpers.reference_training import assert_same_weights, batches, loss_of, share, train_beside
from ..helpers.requirements import need_programs
from ..helpers.styles import STYLES, distributed
from ..helpers.world import everywhere


@pytest.fixture(autouse=True)
def _compiler() -> None:
    need_programs("g++")


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
    wrapped, optimizer = distributed(style, model, torch.optim.SGD(model.parameters(), lr=1.0))
    compiled = torch.compile(wrapped, backend="aot_eager")
    alone = torch.optim.SGD(reference.parameters(), lr=1.0)
    train_beside(batches(3), compiled, optimizer, reference, alone)
    assert_same_weights(model, reference)


def freshly_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` without earlier caches. The result raises AssertionError if no part of it was compiled.

    It ignores a warning that torch raises internally.
    """
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    made = torch.compile(function, backend=counter)

    def run(*args: torch.Tensor) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
            result = made(*args)
        assert counter.frame_count
        return result

    return run


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", STYLES)
@everywhere
def test_a_compiled_backward_combines_gradients(style: str) -> None:
    """Then autograd calls dualdist while a compiled function runs, in which torch compiles all that is called."""
    model, reference = hvd.SyncBatchNorm.convert_sync_batchnorm(make_model()), make_model()
    hooked: list[torch.Tensor] = []
    next(model.parameters()).register_post_accumulate_grad_hook(hooked.append)
    wrapped, optimizer = distributed(style, model, torch.optim.SGD(model.parameters(), lr=1.0))
    alone = torch.optim.SGD(reference.parameters(), lr=1.0)

    @freshly_compiled
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
    assert len(hooked) == 3


@pytest.mark.only_ci(where=lambda style: style == "optimizer")
@pytest.mark.ranks(2)
@pytest.mark.world_kinds("torch-gloo", "horovod-gloo")
@pytest.mark.parametrize("style", STYLES)
@everywhere
def test_compiled_autograd_is_refused_and_training_without_it_continues(style: str) -> None:
    torch.manual_seed(0)
    model, reference = nn.Linear(5, 1).double(), nn.Linear(5, 1).double()
    reference.load_state_dict(model.state_dict())
    wrapped, optimizer = distributed(style, model, torch.optim.SGD(model.parameters(), lr=1.0))
    alone = torch.optim.SGD(reference.parameters(), lr=1.0)
    train_beside(batches(2), wrapped, optimizer, reference, alone)
    with torch._dynamo.config.patch(compiled_autograd=True):
        # inside: torch.compile reads the setting
        backward = freshly_compiled(lambda inputs, targets: loss_of(wrapped, inputs, targets).backward())
        inputs, targets = next(batches(1))
        with pytest.raises(RuntimeError, match="Compiled autograd must be off"):
            backward(share(inputs), share(targets))
    train_beside(batches(2), wrapped, optimizer, reference, alone)
    assert_same_weights(model, reference)


def own(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's half of 4 numbers."""
    return x.view(2, 2)[hvd.rank()]


Function = Callable[..., Any]
CALLS: dict[str, tuple[Function, Function]] = {
    "allreduce": (lambda x: hvd.allreduce(2 * x, op=hvd.Sum), lambda xs: 2 * sum(xs)),
    "grouped_allreduce": (lambda x: hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)[1], lambda xs: 2 * sum(xs)),
    "allgather": (lambda x: hvd.allgather(2 * x), lambda xs: 2 * torch.cat(xs)),
    "broadcast": (lambda x: hvd.broadcast(2 * x, 1), lambda xs: 2 * xs[1]),
    "reduce": (lambda x: hvd.reduce(2 * x, root_rank=1, op=hvd.Sum), lambda xs: 2 * sum(xs) * hvd.rank()),
    "reducescatter": (lambda x: hvd.reducescatter(2 * x, op=hvd.Sum), lambda xs: 2 * sum(map(own, xs))),
    "alltoall": (
        lambda x: hvd.alltoall(2 * x, torch.tensor([2, 2], dtype=torch.int32))[0],
        lambda xs: 2 * torch.cat([own(x) for x in xs]),
    ),
}
"""A function to compile, and its result from the inputs of both ranks."""


@pytest.mark.only_ci(where=lambda name: name not in ("allreduce", "allgather", "reduce"))
@pytest.mark.only_all(where=lambda world, name: "horovod" in world and name != "allreduce")
@pytest.mark.ranks(2)
@pytest.mark.world_kinds("torch-gloo", "horovod-gloo")
@pytest.mark.parametrize("name", CALLS)
@everywhere
def test_a_compiled_function_may_call_collectives(name: str) -> None:
    """With the same results and gradients as when it is not compiled."""
    function, expect = CALLS[name]

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = torch.ones(4, requires_grad=True)
        result = function(weight * x) + 1
        result.square().sum().backward()
        return result.detach(), weight.grad

    compiled = freshly_compiled(run)
    for step in range(3):
        inputs = [torch.arange(4.0) + 10 * rank + step for rank in range(2)]
        result, gradient = compiled(inputs[hvd.rank()])
        torch.testing.assert_close(result, expect(inputs) + 1)
        torch.testing.assert_close(gradient, run(inputs[hvd.rank()])[1])


@pytest.mark.ranks(2)
@pytest.mark.world_kinds("torch-gloo", "horovod-gloo")
@everywhere
def test_a_compiled_function_may_call_collectives_without_gradients() -> None:
    @freshly_compiled
    def run(x: torch.Tensor, parameter: torch.Tensor) -> Any:
        hvd.broadcast_parameters([parameter], 1)
        total = hvd.synchronize(hvd.allreduce_async(2 * x, op=hvd.Sum)) + parameter
        factor: int = hvd.broadcast_object(7 + hvd.rank(), 1)
        return total * factor

    for step in range(3):
        inputs = [torch.arange(4.0) + 10 * rank + step for rank in range(2)]
        parameter = torch.full((4,), float(hvd.rank()))
        torch.testing.assert_close(run(inputs[hvd.rank()], parameter), 8 * (2 * inputs[0] + 2 * inputs[1] + 1))


def test_no_public_collective_is_compiled() -> None:
    for name in [*COLLECTIVES, "broadcast_parameters", "broadcast_optimizer_state", "join"]:
        assert getattr(hvd, name)._torchdynamo_disable, name


@pytest.mark.only_ci
@pytest.mark.ranks(2)
@pytest.mark.world_kinds("torch-gloo", "horovod-gloo")
@everywhere
def test_graphs_of_a_compiled_module_are_split_at_the_buckets_as_in_torch() -> None:
    """So that each bucket is sent while the rest of the compiled backward runs."""
    if not CAN_SPLIT_GRAPHS:
        pytest.skip("needs torch 2.7")

    def graphs(wrap: Callable[[Any], Any]) -> int:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(4)))
        counter = CompileCounterWithBackend("aot_eager")
        compiled = wrap(torch.compile(model, backend=counter))
        compiled(torch.ones(2, 600)).sum().backward()
        return counter.frame_count

    expected = graphs(lambda model: TorchDataParallel(model, bucket_cap_mb=1))
    assert expected > 1
    assert graphs(lambda model: hvd.DistributedDataParallel(model, bucket_cap_mb=1)) == expected
    assert graphs(lambda model: hvd.DistributedDataParallel(model, bucket_cap_mb=0.5)) == 1  # torch raises
