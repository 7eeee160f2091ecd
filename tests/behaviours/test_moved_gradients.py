"""Gradients that a script puts into other memory, or whose memory is the script's: they are combined in any case.

The loss has the gradient rank + 1 everywhere, so that the mean over n ranks is (n + 1) / 2.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.ranks import mean
from ..helpers.styles import sgd
from ..helpers.world import everywhere

Model = Any


def new_model() -> Model:
    """Return a model with a convolution, so that channels_last matters."""
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 3), nn.Linear(3, 3))


def wrap(style: str, model: Model) -> Any:
    """Return the optimizer, or the wrapper. Each layer has its own bucket."""
    if style == "module":
        return hvd.DistributedDataParallel(model, bucket_cap_mb=1e-5)
    groups = [list(part.parameters()) for part in model if list(part.parameters())]
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), groups=groups)


def make(style: str) -> tuple[Model, Any]:
    model = new_model()
    return model, wrap(style, model)


def backward(model: Model) -> None:
    total: Any = sum(param.sum() for param in model.parameters())  # the last one's gradient arrives first
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout contract")
        (total * (hvd.rank() + 1.0)).backward()


def check(model: Model, expected: float) -> None:
    for param in model.parameters():
        torch.testing.assert_close(param.grad, torch.full_like(param, expected))


def each(change: Callable[[torch.Tensor], object]) -> Callable[[Model], None]:
    def changed(model: Model) -> None:
        for param in model.parameters():
            change(param)

    return changed


def set_data(param: torch.Tensor) -> None:
    param.grad.data = param.grad.data.clamp(-100, 100)  # type: ignore[union-attr]


def other_strides(param: torch.Tensor) -> None:
    assert param.grad is not None
    flipped = param.grad.permute(*reversed(range(param.dim()))).contiguous()
    param.grad.data = flipped.permute(*reversed(range(param.dim())))


def exchange(model: Model) -> None:
    first, second = model[2], model[3]
    for name in ("weight", "bias"):
        one, other = getattr(first, name), getattr(second, name)
        one.grad, other.grad = other.grad, one.grad


def flatten(model: Model) -> None:
    params = list(model.parameters())
    flat = torch.cat([param.grad.flatten() for param in params])
    for param, part in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.grad.data = part.view_as(param)


def share_one(model: Model) -> None:
    """Let the gradients of the linear layers' biases be views of a gradient of the package."""
    model[3].bias.grad = model[2].bias.grad.view(3)


def resize(param: torch.Tensor) -> None:
    assert param.grad is not None
    storage = param.grad.untyped_storage()
    if storage.resizable():  # memory that processes share is not
        storage.resize_(0)
    param.grad = None


CHANGES: dict[str, Callable[[Model], object]] = {
    "data": each(set_data),
    "data of one": lambda model: set_data(model[2].weight),
    "set": each(lambda param: param.grad.set_(param.grad.clone())),  # type: ignore[union-attr, arg-type]
    "zeros": each(lambda param: setattr(param.grad, "data", torch.zeros_like(param))),
    "zeros in place by data": each(lambda param: param.grad.data.zero_()),  # type: ignore[union-attr]
    "strides": each(other_strides),
    "transposed in place": each(lambda param: param.grad.t_() if param.dim() == 2 else None),  # type: ignore[union-attr]
    "clone": each(lambda param: setattr(param, "grad", param.grad.clone())),  # type: ignore[union-attr]
    "detached in place": each(lambda param: param.grad.detach_()),  # type: ignore[union-attr]
    "exchanged": exchange,
    "flattened": flatten,
    "channels last": lambda model: model.to(memory_format=torch.channels_last),
    "to float64 and back": lambda model: model.double().float(),
    "resized storage": each(resize),
    "shared memory": lambda model: model.share_memory(),
    "one gradient for two": share_one,
}

every_change = pytest.mark.parametrize("change", CHANGES)
styles = pytest.mark.parametrize("style", ["optimizer", "module"])


@styles
@every_change
@pytest.mark.parametrize("on", ["all ranks", "rank 0"])
@everywhere
def test_gradients_that_were_moved_are_combined_in_the_next_backward(style: str, change: str, on: str) -> None:
    model, wrapper = make(style)
    for number in range(9):
        backward(model)
        check(model, mean())
        if number and (on == "all ranks" or hvd.rank() == 0):
            CHANGES[change](model)
        if style == "optimizer":
            wrapper.step()
        if change == "one gradient for two":  # zeroed or not, their sums would be in one memory
            model.zero_grad()
        wrapper.zero_grad(set_to_none=number % 4 < 2)


@styles
@pytest.mark.parametrize("change", ["data", "set", "strides", "clone", "flattened", "channels last", "shared memory"])
@everywhere
def test_gradients_that_were_moved_accumulate(style: str, change: str) -> None:
    model, _ = make(style)
    for number in range(1, 4):
        backward(model)
        check(model, number * mean())
        CHANGES[change](model)
        check(model, number * mean())


@styles
@everywhere
def test_gradients_that_lie_in_a_buffer_of_the_script_stay_there(style: str) -> None:
    model, _ = make(style)
    params = list(model.parameters())
    for number in range(6):
        if number in (0, 3):  # before the first backward, and later
            flat = torch.zeros(sum(param.numel() for param in params))
            views = [
                part.view_as(param) for param, part in zip(params, flat.split([p.numel() for p in params]), strict=True)
            ]
            for param, view in zip(params, views, strict=True):
                param.grad = view
        flat.zero_()
        backward(model)
        torch.testing.assert_close(flat, torch.full_like(flat, mean()))
        assert all(param.grad is view for param, view in zip(params, views, strict=True))


@styles
@everywhere
def test_a_list_of_gradients_that_was_made_before_stays_the_gradients(style: str) -> None:
    model, _ = make(style)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    kept = [param.grad for param in model.parameters()]
    for number in range(3):
        for grad in kept:
            grad.fill_(number)
        backward(model)
        for grad in kept:
            torch.testing.assert_close(grad, torch.full_like(grad, number + mean()))


@styles
@pytest.mark.parametrize("kind", ["in place", "replaced"])
@pytest.mark.parametrize("when", ["before", "after"])
@everywhere
def test_hooks_of_autograd_nodes_run_before_gradients_are_sent(style: str, kind: str, when: str) -> None:
    """Of the nodes that accumulate gradients (pytorch#76464), before wrapping and after it."""
    model = new_model()
    nodes = []

    def add_hooks() -> None:
        for param in model.parameters():
            node: Any = param.expand_as(param).grad_fn.next_functions[0][0]

            def hook(*_: object, own: Any = param) -> None:
                own.grad = own.grad.mul_(0.5) if kind == "in place" else own.grad * 0.5

            nodes.append(node)
            node.register_hook(hook)

    if when == "before":
        add_hooks()
    wrapper = wrap(style, model)
    if when == "after":
        add_hooks()
    for _ in range(4):
        backward(model)
        check(model, mean() / 2)
        wrapper.zero_grad()


@everywhere
def test_a_hook_that_reads_all_gradients_reads_those_of_this_rank() -> None:
    """As a library does that collects gradients in buckets of its own."""
    model, _ = make("optimizer")
    params = list(model.parameters())
    read: list[torch.Tensor] = []
    params[0].register_post_accumulate_grad_hook(lambda _: read.extend(param.grad.clone() for param in params))
    for number in range(4):
        read.clear()
        model.zero_grad(set_to_none=number < 2)
        backward(model)
        check(model, mean())
        assert all(bool((grad == hvd.rank() + 1).all()) for grad in read)


@pytest.mark.ranks(2, 3)
@pytest.mark.world_kinds("torch-gloo", "torch-mpi")
@pytest.mark.parametrize("as_views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize("begin", [0, 2], ids=["first", "later"])
@everywhere
def test_ddp_of_torch_beside_the_optimizer_gives_the_same_averages(begin: int, as_views: bool, to_none: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
    optimizer = sgd(model.parameters(), lr=0.1, named_parameters=model.named_parameters())
    wrapped: nn.Module = model
    reference = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
    reference.load_state_dict(model.state_dict())
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    for number in range(6):
        inputs = torch.randn(hvd.size(), 8, 40, generator=torch.Generator().manual_seed(number))
        if number == begin:
            wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01, gradient_as_bucket_view=as_views)
        optimizer.zero_grad(set_to_none=to_none)
        wrapped(inputs[hvd.rank()]).square().mean().backward()
        alone.zero_grad()
        reference(inputs).square().mean().backward()
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.grad, expected.grad)
        optimizer.step()
        alone.step()


@pytest.mark.ranks(2, 3)
@pytest.mark.world_kinds("torch-gloo", "torch-mpi")
@pytest.mark.parametrize("as_views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("local", ["ddp", "optimizer", "neither"])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
@everywhere
def test_ddp_of_torch_and_the_optimizer_may_accumulate_differently(as_views: bool, local: str, op: int) -> None:
    layer = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(layer.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0), op=op)
    wrapped = nn.parallel.DistributedDataParallel(layer, gradient_as_bucket_view=as_views)
    middle, times = (hvd.size() - 1) / 2, hvd.size() if op == hvd.Sum else 1
    for number in range(5):
        optimizer.zero_grad()
        expected = 10 + 20 * middle
        if op == hvd.Average:  # a sum of sums would be an error
            around = {"ddp": wrapped.no_sync, "optimizer": optimizer.no_sync}.get(local, contextlib.nullcontext)
            with around():
                wrapped(torch.full((1, 3), 1.0 + 2 * hvd.rank() + number)).sum().backward()
            expected += 1 + 2 * middle + number
        wrapped(torch.full((1, 3), 10.0 + 20 * hvd.rank())).sum().backward()
        torch.testing.assert_close(layer.weight.grad, torch.full((1, 3), expected * times))
        optimizer.step()
