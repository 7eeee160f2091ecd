"""Training on a device: a world of one over its transport, and two ranks that share it.

    ci/gpu

runs these on a GPU with any Python that has torch and pytest; they need no Horovod, no MPI and no network. Without a
GPU, they run on the simulated accelerator (tests/accelerator).
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import dualdist as hvd

from ..helpers.world import World
from ..parity.loop import SCENARIOS, STYLES, Outcome, alone, train
from ..parity.rounding import bounds, expected
from ..parity.test_training import check
from .device import DEVICE, KIND, needs_device, on_gpus

pytestmark = [*needs_device, pytest.mark.only_ci]


def on_rank(name: str, style: str, dtype: torch.dtype, transport: str) -> Outcome:
    assert hvd.transport_name() == transport
    device = f"{KIND}:{hvd.device().index}"
    return train(SCENARIOS[name], STYLES[style], dtype, hvd.size(), [[hvd.rank()]], device)


def transport(world: World) -> str:
    return world.kind.environment["DUALDIST_TRANSPORT"]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["plain", "accumulate", "clip", "frozen", "sync-batch-norm", "two-optimizers"])
def test_ranks_on_one_gpu_train_as_the_cpu_does_with_the_whole_batch(either: World, name: str, style: str) -> None:
    size = either.size
    oracle, bound = expected(name, size, torch.float64), bounds(name, size, torch.float64)
    for outcome in either.run(on_rank, name, style, torch.float64, transport(either)):
        check(outcome.gradients, oracle.gradients, bound.gradients)
        check(outcome.state, oracle.state, bound.state)


@pytest.mark.parametrize("style", STYLES)
def test_sync_batch_norm_in_float32_is_that_of_the_cpu_in_float64(pair: World, style: str) -> None:
    oracle = expected("sync-batch-norm", 2, torch.float64)
    bound = bounds("sync-batch-norm", 2, torch.float32)
    for outcome in pair.run(on_rank, "sync-batch-norm", style, torch.float32, transport(pair)):
        state = {name: tensor.to(oracle.state[name].dtype) for name, tensor in outcome.state.items()}
        check(state, oracle.state, bound.state)


def scaled_alone(device: str) -> Outcome:
    return train(SCENARIOS["fp16-scaler"], alone, torch.float32, 2, [[0], [1]], device)


@pytest.mark.parametrize("style", STYLES)
def test_an_fp16_overflow_on_one_rank_makes_both_skip(pair: World, style: str) -> None:
    oracle, _ = pair.run(scaled_alone, DEVICE)
    for outcome in pair.run(on_rank, "fp16-scaler", style, torch.float32, transport(pair)):
        assert outcome.scales == oracle.scales
        check(outcome.state, oracle.state, bounds("fp16-scaler", 2, torch.float32).state)


LAYERS = 6


def launches(device: str) -> tuple[list[float], list[float]]:
    """Return when one backward starts its reductions, and when it starts the layers' own backwards."""
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS))).to(device)
    wrapped = hvd.DistributedDataParallel(model, bucket_cap_mb=0.01)
    inputs = torch.ones(8, 64, device=device)
    wrapped(inputs).sum().backward()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # of torch 2.11
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            wrapped(inputs).sum().backward()
    events = trace.events() or []
    reductions = [event.time_range.start for event in events if event.name.endswith(":all_reduce")]
    layers = [event.time_range.start for event in events if event.name == "AddmmBackward0"]
    return sorted(reductions), sorted(layers)


@on_gpus("profiler")
def test_reductions_start_while_backward_still_runs(one: World) -> None:
    ((reductions, layers),) = one.run(launches, DEVICE)
    assert len(layers) == LAYERS and len(reductions) >= LAYERS
    assert reductions[0] < layers[-1]


def normalized(device: str, dtype: torch.dtype, is_channels_last: bool) -> list[torch.Tensor]:
    """Return output and gradients of SyncBatchNorm, on the host."""
    generator = torch.Generator().manual_seed(0)
    layout = torch.channels_last if is_channels_last else torch.contiguous_format
    whole = torch.randn(8, 4, 5, 3, generator=generator) * 3 + 2
    inputs = whole.to(device, dtype).contiguous(memory_format=layout).requires_grad_()
    layer = hvd.SyncBatchNorm(4).to(device)
    output = layer(inputs)
    assert output.dtype == dtype and output.is_contiguous(memory_format=layout)
    (output * torch.linspace(-1, 2, whole.numel()).view_as(whole).to(device, dtype)).sum().backward()
    grads = [inputs.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var]
    return [tensor.detach().float().cpu() for tensor in [output, *grads] if tensor is not None]


@pytest.mark.parametrize("is_channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_sync_batch_norm_gives_the_numbers_of_the_cpu(one: World, dtype: torch.dtype, is_channels_last: bool) -> None:
    (found,) = one.run(normalized, DEVICE, dtype, is_channels_last)
    (expected,) = one.run(normalized, "cpu", dtype, is_channels_last)
    bound = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    for own, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(own, reference, rtol=bound, atol=bound)


def normalized_batches(
    device: str, batches: tuple[int, int], shape: tuple[int, ...], affine: bool, momentum: float | None
) -> list[torch.Tensor]:
    """Return the same of two calls with batches of different sizes, which may be 0."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(sum(batches), *shape, generator=generator, dtype=torch.float64) * 3 + 2
    own = whole.split(batches)[hvd.rank()].to(device)
    layer = hvd.SyncBatchNorm(shape[0], eps=0.1, momentum=momentum, affine=affine, dtype=torch.float64).to(device)
    results = []
    for factor in (1, -2):
        inputs = (own * factor).transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
        output = layer(inputs)
        (output * output.detach().cos()).sum().backward()
        results += [output, inputs.grad, *(param.grad for param in layer.parameters()), *layer.buffers()]
    return [tensor.detach().clone().cpu() for tensor in results]


@pytest.mark.parametrize("shape", [(4,), (4, 5, 3), (4, 3, 2, 2)], ids=str)
@pytest.mark.parametrize("batches", [(6, 9), (5, 0), (0, 7), (1, 1)], ids=str)
def test_sync_batch_norm_takes_batches_of_any_size(
    pair: World, batches: tuple[int, int], shape: tuple[int, ...]
) -> None:
    for affine, momentum in ((True, 0.3), (False, None)):
        found = pair.run(normalized_batches, DEVICE, batches, shape, affine, momentum)
        expected = pair.run(normalized_batches, "cpu", batches, shape, affine, momentum)
        for own, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(own, reference, rtol=1e-9, atol=1e-9)
