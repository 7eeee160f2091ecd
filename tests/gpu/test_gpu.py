"""Training on a GPU: a world of one on nccl, and two ranks that share one GPU over gloo.

    ci/gpu

runs these with any Python that has torch and pytest; they need no Horovod, no MPI and no network.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import dualdist as hvd

from ..helpers.world import World, WorldKind, started
from ..parity.loop import SCENARIOS, STYLES, Outcome, alone, train
from ..parity.rounding import bounds, expected
from ..parity.test_training import check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "{size}",
    "--no-python",
)


def _world(transport: str, size: int) -> Iterator[World]:
    settings = MappingProxyType({"DUALDIST_BACKEND": "torch", "DUALDIST_TRANSPORT": transport})
    with started(WorldKind(f"torch-{transport}", TORCHRUN, settings), size) as world:
        yield world


@pytest.fixture(scope="module")
def one() -> Iterator[World]:
    yield from _world("nccl", 1)


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    yield from _world("gloo", 2)


def on_rank(name: str, style: str, dtype: torch.dtype, transport: str) -> Outcome:
    assert hvd.transport_name() == transport
    device = f"cuda:{hvd.device().index}"
    return train(SCENARIOS[name], STYLES[style], dtype, hvd.size(), [[hvd.rank()]], device)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["plain", "accumulate", "clip", "two-optimizers"])
def test_a_world_of_one_trains_on_nccl(one: World, name: str, style: str) -> None:
    oracle, bound = expected(name, 1, torch.float64), bounds(name, 1, torch.float64)
    (outcome,) = one.run(on_rank, name, style, torch.float64, "nccl")
    check(outcome.gradients, oracle.gradients, bound.gradients)
    check(outcome.state, oracle.state, bound.state)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["plain", "accumulate", "frozen", "sync-batch-norm"])
def test_two_ranks_on_one_gpu_train_as_the_cpu_does_with_the_whole_batch(
    pair: World, name: str, style: str
) -> None:
    oracle, bound = expected(name, 2, torch.float64), bounds(name, 2, torch.float64)
    for outcome in pair.run(on_rank, name, style, torch.float64, "gloo"):
        check(outcome.gradients, oracle.gradients, bound.gradients)
        check(outcome.state, oracle.state, bound.state)


@pytest.mark.parametrize("style", STYLES)
def test_sync_batch_norm_in_float32_is_that_of_the_cpu_in_float64(pair: World, style: str) -> None:
    oracle = expected("sync-batch-norm", 2, torch.float64)
    bound = bounds("sync-batch-norm", 2, torch.float32)
    for outcome in pair.run(on_rank, "sync-batch-norm", style, torch.float32, "gloo"):
        state = {name: tensor.to(oracle.state[name].dtype) for name, tensor in outcome.state.items()}
        check(state, oracle.state, bound.state)


@pytest.mark.parametrize("style", STYLES)
def test_an_fp16_overflow_on_one_rank_makes_both_skip(pair: World, style: str) -> None:
    oracle = train(SCENARIOS["fp16-scaler"], alone, torch.float32, 2, [[0], [1]], "cuda:0")
    for outcome in pair.run(on_rank, "fp16-scaler", style, torch.float32, "gloo"):
        assert outcome.scales == oracle.scales
        check(outcome.state, oracle.state, bounds("fp16-scaler", 2, torch.float32).state)


LAYERS = 6


def launches(device: str) -> tuple[list[float], list[float]]:
    """Return when one backward starts its reductions, and when it starts the layers' own backwards."""
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS))).to(device)
    wrapped = hvd.DistributedDataParallel(model, bucket_cap_mb=0.01)
    inputs = torch.ones(8, 64, device=device)
    wrapped(inputs).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        wrapped(inputs).sum().backward()
    events = trace.events() or []
    reductions = [event.time_range.start for event in events if event.name.endswith(":all_reduce")]
    layers = [event.time_range.start for event in events if event.name == "AddmmBackward0"]
    return sorted(reductions), sorted(layers)


def test_reductions_start_while_backward_still_runs(one: World) -> None:
    ((reductions, layers),) = one.run(launches, "cuda:0")
    assert len(layers) == LAYERS and len(reductions) >= LAYERS
    assert reductions[0] < layers[-1]
