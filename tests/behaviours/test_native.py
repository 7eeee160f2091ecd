"""dualdist.native: torch's own DDP and Horovod's own optimizer in the worlds that dualdist has started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.world import everywhere


@pytest.mark.ranks(2, 3)
@everywhere
def test_ddp_of_torch_trains_over_the_process_group() -> None:
    from dualdist.native.torch import DistributedDataParallel, process_group

    assert DistributedDataParallel is nn.parallel.DistributedDataParallel
    model: Any = nn.Linear(1, 1, bias=False)
    wrapped = DistributedDataParallel(model, process_group=process_group())
    wrapped(torch.full((1, 1), hvd.rank() + 1.0)).sum().backward()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    assert model.weight.grad.item() == (hvd.size() + 1) / 2


@pytest.mark.ranks(3)
@everywhere
def test_a_process_set_has_a_process_group_too() -> None:
    from dualdist.native.torch import process_group

    pair = hvd.add_process_set([0, 2])
    group = process_group(pair)
    if pair.included():
        assert group.size() == 2
        total = torch.tensor([hvd.rank() + 1.0])
        group.allreduce([total]).wait()
        assert total.item() == 4.0
    hvd.remove_process_set(pair)


@everywhere
def test_a_set_of_a_communicator_that_is_not_registered_is_refused() -> None:
    from dualdist.native.torch import process_group

    not_registered = hvd.ProcessSet(SimpleNamespace(Get_group=None))  # its ranks are not known
    with pytest.raises(TypeError, match="`process_set` must be registered"):
        process_group(not_registered)


@pytest.mark.ranks(2, 3)
@pytest.mark.world_kinds("horovod-gloo", "horovod-mpi")
@everywhere
def test_horovods_own_optimizer_trains() -> None:
    from dualdist.native.horovod import hvd as real

    weight = nn.Parameter(torch.zeros(1))
    optimizer = real.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
    assert type(optimizer).__module__ == "horovod.torch.optimizer"
    weight.mul(hvd.rank() + 1.0).sum().backward()
    optimizer.step()
    assert weight.item() == -(hvd.size() + 1) / 2
