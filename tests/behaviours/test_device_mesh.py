"""Meshes of torch over the joined world, and their dimensions as process sets."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import dualdist as hvd

from ..helpers.dtensors import Replicate, Shard, distribute_tensor
from ..helpers.rejoining import outside_world
from ..helpers.world import everywhere


def all_in_last() -> DeviceMesh:
    """Return a mesh whose last dimension has all ranks, and whose first one has this rank alone."""
    return hvd.device_mesh((1, hvd.size()), ("replicate", "shard"))


@everywhere
def test_a_mesh_has_the_ranks_of_the_world() -> None:
    mesh = hvd.device_mesh()
    assert mesh.mesh_dim_names == ("data",) and mesh.mesh.tolist() == list(range(hvd.size()))
    sharded = distribute_tensor(torch.arange(2.0 * hvd.size()), mesh, [Shard(0)])
    assert sharded.to_local().tolist() == [2.0 * hvd.rank(), 2.0 * hvd.rank() + 1]
    gathered: Any = sharded.redistribute(mesh, [Replicate()])
    assert gathered.to_local().tolist() == list(range(2 * hvd.size()))


@everywhere
def test_a_mesh_has_several_dimensions() -> None:
    mesh = all_in_last()
    assert mesh.mesh.tolist() == [list(range(hvd.size()))]
    for name, ranks in (("replicate", [hvd.rank()]), ("shard", list(range(hvd.size())))):
        assert dist.get_process_group_ranks(mesh.get_group(name)) == ranks
        total = torch.tensor([hvd.rank()])
        dist.all_reduce(total, group=mesh.get_group(name))
        assert total.item() == sum(ranks)


@everywhere
def test_each_world_has_meshes_of_its_own() -> None:
    former = all_in_last()
    with outside_world(), pytest.raises(hvd.NotInitializedError):
        hvd.device_mesh()
    if hvd.size() > 1:
        with pytest.raises(ValueError, match="of the world that is joined"):
            hvd.barrier(process_set=former["replicate"])
    hvd.barrier(process_set=all_in_last()["shard"])


@everywhere
def test_a_mesh_that_does_not_fit_the_world_is_refused_on_every_rank() -> None:
    for shape in ((hvd.size() + 1,), (hvd.size(), 2)):
        with pytest.raises(ValueError, match=f"`shape` must have the product {hvd.size()}"):
            hvd.device_mesh(shape)
    for names in ((), ("data", "model"), ("data",) * 2):
        with pytest.raises(ValueError, match="`names` must be 1 different strings"):
            hvd.device_mesh((hvd.size(),), names)
    with pytest.raises(TypeError, match="`names` must be a list of strings"):
        hvd.device_mesh(None, "data")
    with pytest.raises(ValueError, match=r"`shape\[0\]`"):
        hvd.device_mesh((0, hvd.size()), ("a", "b"))
    hvd.barrier()


@pytest.mark.ranks(2, 3)
@everywhere
def test_meshes_that_differ_between_ranks_are_refused() -> None:
    sizes = (hvd.size(), 1) if hvd.rank() else (1, hvd.size())
    with pytest.raises(hvd.CollectiveMismatchError, match="device_mesh"):
        hvd.device_mesh(sizes, ("replicate", "shard"))
    with pytest.raises((ValueError, hvd.CollectiveMismatchError), match=r"shape|device_mesh"):
        hvd.device_mesh((hvd.size() + 1,) if hvd.rank() == 0 else None)
    assert hvd.device_mesh().size() == hvd.size()


@everywhere
def test_a_dimension_is_a_process_set() -> None:
    mesh, ranks, own = all_in_last(), list(range(hvd.size())), torch.tensor([hvd.rank() + 1.0])
    alone, everyone = mesh["replicate"], mesh["shard"]
    assert hvd.allreduce(own, op=hvd.Sum, process_set=everyone).item() == sum(ranks) + hvd.size()
    assert hvd.allreduce(own, op=hvd.Sum, process_set=alone).item() == own.item()
    assert hvd.allgather(own, process_set=alone).tolist() == own.tolist()
    assert hvd.broadcast(own, hvd.rank(), process_set=alone).item() == own.item()
    assert torch.equal(cast(torch.Tensor, hvd.alltoall(own, process_set=alone)), own)
    assert hvd.reducescatter(own, op=hvd.Sum, process_set=alone).tolist() == own.tolist()
    assert hvd.allgather_object("x", process_set=alone) == ["x"]
    assert hvd.broadcast_object(hvd.rank(), 0, process_set=everyone) == 0
    assert hvd.synchronize(hvd.allreduce_async(own, process_set=alone)).item() == own.item()
    hvd.barrier(process_set=alone)
    with pytest.raises(ValueError, match="`root_rank`"):
        hvd.broadcast(own, (hvd.rank() + 1) % 64, process_set=alone)


@everywhere
def test_a_dimension_becomes_a_process_set_once() -> None:
    from dualdist.core.world import current

    mesh = all_in_last()
    hvd.barrier(process_set=mesh["replicate"])
    before = len(current().process_sets)
    for other in (mesh, all_in_last()):
        hvd.barrier(process_set=other["replicate"])
        hvd.barrier(process_set=other["shard"])
    assert len(current().process_sets) == before


@everywhere
def test_collectives_of_a_dimension_are_differentiable() -> None:
    dimension, factor = all_in_last()["shard"], hvd.rank() + 1.0
    ranks = range(hvd.size())
    total = sum(rank + 1.0 for rank in ranks)
    x = torch.ones(1, requires_grad=True)
    for result, grad in (
        (hvd.allreduce(x, op=hvd.Sum, process_set=dimension), total),
        (hvd.allreduce(x, op=hvd.Product, process_set=dimension), total),
        (hvd.allgather(x, process_set=dimension, gradient=hvd.Sum)[hvd.rank()], factor),
        (hvd.broadcast(x, 0, process_set=dimension, gradient=hvd.Sum), total if hvd.rank() == 0 else 0.0),
    ):
        x.grad = None
        (result * factor).sum().backward()
        assert x.grad is not None and x.grad.item() == grad


@everywhere
def test_two_dimensions_are_no_process_set() -> None:
    with pytest.raises(TypeError, match="must be a ProcessSet, a DeviceMesh of one dimension"):
        hvd.allreduce(torch.ones(1), process_set=all_in_last())
    hvd.barrier()


@everywhere
def test_samplers_shard_over_a_dimension() -> None:
    mesh, data = all_in_last(), range(4 * hvd.size())
    for chosen, numbers in ((mesh["replicate"], list(data)), (mesh["shard"], list(data)[hvd.rank() :: hvd.size()])):
        sampler = hvd.DistributedSampler(data, shuffle=False, process_set=chosen)
        assert list(sampler) == numbers
        sampler.advance(2)
        assert sampler.state_dict()["num_consumed"] == 2 * sampler.num_replicas
        assert list(hvd.samplers.DistributedSamplerWrapper(data, process_set=chosen)) == numbers
        assert list(hvd.split_by_rank(data, process_set=chosen)) == numbers
    with pytest.raises(ValueError, match="must be None with `process_set`"):
        hvd.DistributedSampler(data, 1, 0, process_set=mesh["shard"])


@everywhere
def test_metrics_checks_and_optimizers_use_a_dimension() -> None:
    alone = all_in_last()["replicate"]
    mean = hvd.metrics.Mean(process_set=alone)
    mean.update(torch.tensor([float(hvd.rank())]))
    assert mean.compute() == hvd.rank()
    assert hvd.metrics.gather_all_tensors(torch.ones(1), group=alone)[0].item() == 1.0
    assert hvd.metrics.gather_in_order(torch.ones(2), [1, 0], process_set=alone).tolist() == [1.0, 1.0]
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), hvd.rank(), process_set=alone)
    hvd.check_replicas(model, process_set=alone)
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), process_set=alone)
    (model.weight * hvd.rank()).sum().backward()
    optimizer.step()
    assert model.weight.item() == 0.0
    assert hvd.SyncBatchNorm(1, process_set=alone)(torch.ones(4, 1)).shape == (4, 1)
