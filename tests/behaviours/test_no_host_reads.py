"""In a regular step the host reads no tensor: on a GPU it would wait for all that the GPU has to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.no_host_reads import HostRead, can_watch, no_host_reads
from ..helpers.world import everywhere

pytestmark = pytest.mark.skipif(
    not can_watch(), reason="this torch cannot view tensors in a dispatch mode and in inference mode"
)
Step = Callable[[], None]


def network(dtype: torch.dtype = torch.float32, *, normalized: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = hvd.SyncBatchNorm(8) if normalized else nn.ReLU()
    return nn.Sequential(nn.Linear(4, 8), middle, nn.Linear(8, 2)).to(dtype)


def optimizer_of(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters(), **options)


def backward(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    model(torch.full((3, 4), hvd.rank() + 1.0, dtype=dtype)).square().mean().backward()


def check(step: Step) -> None:
    """Run regular steps without a host read, after a first one."""
    step()
    with no_host_reads():
        for _ in range(3):
            step()


@everywhere
def test_optimizer_style() -> None:
    model = network()
    optimizer = optimizer_of(model)

    def step() -> None:
        optimizer.zero_grad()
        backward(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    check(step)


@everywhere
def test_module_style() -> None:
    model = hvd.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        backward(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    check(step)


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@everywhere
def test_compression(compression: str, op: Any) -> None:
    model = network()
    optimizer = optimizer_of(model, compression=getattr(hvd.Compression, compression), op=op)

    def step() -> None:
        optimizer.zero_grad()
        backward(model)
        optimizer.step()

    check(step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@everywhere
def test_dtypes(dtype: torch.dtype) -> None:
    model = network(dtype)
    optimizer = optimizer_of(model)

    def step() -> None:
        optimizer.zero_grad()
        backward(model, dtype)
        optimizer.step()

    check(step)


@everywhere
def test_accumulation_with_a_number_of_passes() -> None:
    model = network()
    optimizer = optimizer_of(model, backward_passes_per_step=2)

    def step() -> None:
        optimizer.zero_grad()
        backward(model)
        backward(model)
        optimizer.step()

    check(step)


@everywhere
def test_accumulation_with_no_sync() -> None:
    model = hvd.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        with model.no_sync():
            backward(model)
        backward(model)
        optimizer.step()

    check(step)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("wrapped", [False, True])
@everywhere
def test_sync_batch_norm(momentum: float | None, wrapped: bool) -> None:
    bare = network(normalized=True)
    bare[1].momentum = momentum  # type: ignore[assignment]
    model = hvd.DistributedDataParallel(bare) if wrapped else bare
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if wrapped else optimizer_of(model)

    def step() -> None:
        optimizer.zero_grad()
        backward(model)
        optimizer.step()

    check(step)


@everywhere
def test_parameters_that_are_frozen_unused_or_missing_on_a_rank() -> None:
    model = nn.ModuleList([nn.Linear(4, 2) for _ in range(4)])
    model[1].requires_grad_(False)
    optimizer = optimizer_of(model)

    def step() -> None:
        optimizer.zero_grad()
        used = model if hvd.rank() == 0 else model[:3]
        backward(nn.Sequential(Added(used[0], used[1], used[2 if hvd.rank() == 0 else 0])))
        optimizer.step()

    check(step)


class Added(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = sum(part(x) for part in self.parts)
        return total


@pytest.mark.parametrize(
    "read",
    [
        lambda tensor: tensor.item(),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.cpu(),
        bool,
        float,
        int,
        lambda tensor: next(iter(tensor)).item(),
        lambda tensor: tensor.copy_(torch.tensor([2.0])),
        lambda tensor: torch._foreach_copy_([tensor], [torch.tensor([2.0])]),
        lambda tensor: tensor.to("meta"),
        lambda tensor: torch.zeros(1, device="meta").copy_(tensor),
        torch.nonzero,
        torch._C._TensorBase.item,
        lambda tensor: torch.equal(tensor, tensor),
    ],
)
def test_the_helper_notices_each_read(read: Callable[[torch.Tensor], object]) -> None:
    tensor = torch.zeros(1)
    with no_host_reads(), pytest.raises(HostRead):
        read(tensor)
    assert tensor.item() == 0.0
