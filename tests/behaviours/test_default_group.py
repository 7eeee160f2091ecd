"""What a script and its helpers find after init: torch's default process group, and torchrun's variables."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

import dualdist as hvd
from dualdist.core.launch import detect, without_copies

from ..helpers.rejoining import outside_world
from ..helpers.styles import step
from ..helpers.world import everywhere

TORCHRUN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
)


def check_group() -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (hvd.rank(), hvd.size())
    total = torch.tensor([hvd.rank() + 1.0])
    dist.all_reduce(total)
    assert total.item() == hvd.size() * (hvd.size() + 1) / 2
    found: list[Any] = [None] * hvd.size()
    dist.all_gather_object(found, hvd.rank())
    assert found == list(range(hvd.size()))


@everywhere
def test_the_default_group_has_the_ranks_of_the_world() -> None:
    check_group()
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@everywhere
def test_each_world_has_a_default_group_of_its_own() -> None:
    last = dist.new_group([hvd.size() - 1])
    with outside_world():
        assert not dist.is_initialized()
    check_group()
    if hvd.rank() == hvd.size() - 1:
        with pytest.raises(ValueError, match="Invalid process group"):
            dist.destroy_process_group(last)


@everywhere
def test_a_script_may_destroy_the_default_group_and_make_its_own() -> None:
    dist.destroy_process_group()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with outside_world():
        assert dist.get_world_size() == 1  # left to the script
        dist.destroy_process_group()
    check_group()


@everywhere
def test_groups_of_some_ranks_work() -> None:
    groups: Any = [dist.new_group([rank]) for rank in range(hvd.size())]
    total = torch.tensor([hvd.rank() + 1.0])
    dist.all_reduce(total, group=groups[hvd.rank()])
    assert total.item() == hvd.rank() + 1.0


@everywhere
def test_ranks_with_fewer_batches_join_torchs_ddp() -> None:
    model: Any = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Join([wrapped]):
        for _ in range(hvd.rank() + 1):
            optimizer.zero_grad()
            wrapped(torch.ones(1, 1)).sum().backward()
            optimizer.step()
    # In step k, size - k ranks have a gradient of 1. Ranks that have joined get the weights of the last one.
    assert model.weight.item() == pytest.approx(-(hvd.size() + 1) / 2)


@everywhere
def test_post_local_sgd_averages_the_weights() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer: Any = PostLocalSGDOptimizer(
        torch.optim.SGD([weight], lr=1.0), PeriodicModelAverager(period=2, warmup_steps=0)
    )
    for _ in range(3):  # averaged in the first and the third step
        step(optimizer, weight)
    assert weight.item() == pytest.approx(-3 * (hvd.size() + 1) / 2)


@everywhere
def test_programs_find_torchruns_variables_in_each_world() -> None:
    launched = detect(os.environ)
    for _ in range(2):
        rank, size = hvd.rank(), hvd.size()
        numbers = (rank, size, hvd.local_rank(), hvd.local_size(), 0, 1, rank, size, "default")
        *found, address, port = [os.environ[name] for name in TORCHRUN]
        assert found == [str(number) for number in numbers]
        assert hvd.allgather_object((address, port)) == [(address, port)] * hvd.size()
        assert detect(os.environ) == launched
        added = os.environ.keys() - without_copies(os.environ).keys()
        with outside_world():
            assert not added & os.environ.keys()
            assert detect(os.environ) == launched


@pytest.mark.ranks(2, 3)
@pytest.mark.world_kinds("horovod-gloo", "horovod-mpi")
@everywhere
def test_horovods_own_optimizer_trains() -> None:
    import horovod.torch as real

    weight = nn.Parameter(torch.zeros(1))
    optimizer = real.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
    assert type(optimizer).__module__ == "horovod.torch.optimizer"
    step(optimizer, weight)
    assert weight.item() == -(hvd.size() + 1) / 2
