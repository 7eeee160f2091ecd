"""In a regular step the host reads no tensor: on a GPU it would wait for all that the GPU has to do."""

from __future__ import annotations

import contextlib
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


def network(dtype: torch.dtype = torch.float32, middle: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), middle or nn.ReLU(), nn.Linear(8, 2)).to(dtype)


def optimizer_of(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters(), **options)


def check(
    optimizer: torch.optim.Optimizer, model: Callable[[torch.Tensor], Any], passes: int = 1, local: int = 0
) -> None:
    """Run regular steps without a host read, after a first one. local: how many backwards more are in no_sync()."""
    dtype = optimizer.param_groups[0]["params"][0].dtype
    inputs = torch.full((3, 4), hvd.rank() + 1.0, dtype=dtype)

    def step() -> None:
        optimizer.zero_grad()
        for number in range(local + passes):
            with model.no_sync() if number < local else contextlib.nullcontext():  # type: ignore[attr-defined]
                model(inputs).square().mean().backward()
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
        optimizer.step()

    step()
    with no_host_reads():
        for _ in range(3):
            step()


OPTIONS: dict[str, dict[str, Any]] = {
    **{
        f"{name}, {op}": {"compression": getattr(hvd.Compression, name), "op": op}
        for name in ("none", "fp16", "bf16")
        for op in (hvd.Average, hvd.Sum)
    },
    "passes": {"backward_passes_per_step": 2},
}


@pytest.mark.parametrize("case", OPTIONS)
@everywhere
def test_optimizer_style(case: str) -> None:
    model = network()
    check(optimizer_of(model, **OPTIONS[case]), model, OPTIONS[case].get("backward_passes_per_step", 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@everywhere
def test_dtypes(dtype: torch.dtype) -> None:
    model = network(dtype)
    check(optimizer_of(model), model)


@pytest.mark.parametrize("local", [0, 1])
@everywhere
def test_module_style(local: int) -> None:
    model = hvd.DistributedDataParallel(network())
    check(torch.optim.SGD(model.parameters(), lr=0.1), model, local=local)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("wrapped", [False, True])
@everywhere
def test_sync_batch_norm(momentum: float | None, wrapped: bool) -> None:
    bare = network(middle=hvd.SyncBatchNorm(8, momentum=momentum))
    model = hvd.DistributedDataParallel(bare) if wrapped else bare
    check(torch.optim.SGD(model.parameters(), lr=0.1) if wrapped else optimizer_of(model), model)


@everywhere
def test_parameters_that_are_frozen_unused_or_missing_on_a_rank() -> None:
    layers = nn.ModuleList([nn.Linear(4, 2) for _ in range(4)])
    layers[1].requires_grad_(False)
    used = [layers[number] for number in ((0, 1, 2) if hvd.rank() == 0 else (0, 1, 0))]
    check(optimizer_of(layers), lambda inputs: sum(layer(inputs) for layer in used))


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
