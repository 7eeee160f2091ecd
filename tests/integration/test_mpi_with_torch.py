"""The process group over mpi4py under parts of torch: DDP's options, its hooks, torch.compile, and the profiler."""

from __future__ import annotations

import logging
import shutil
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import profiler_legacy
from torch.nn.parallel import DistributedDataParallel

from ..helpers.world import everywhere

pytestmark = pytest.mark.world_kinds("torch-mpi")


def started(work: Any) -> Any:
    assert work is not None
    return work


def total() -> float:
    """Return the sum of rank + 1 over all ranks."""
    return dist.get_world_size() * (dist.get_world_size() + 1) / 2


def own(count: int = 4) -> torch.Tensor:
    return torch.full((count,), dist.get_rank() + 1.0)


@everywhere
def test_a_callback_may_wait_for_another_collective() -> None:
    size = dist.get_world_size()

    def again(future: Any) -> torch.Tensor:
        found: torch.Tensor = future.value()[0]
        for _ in range(2):
            found = started(dist.all_reduce(found, async_op=True)).get_future().wait()[0]
        return found * 2

    future = started(dist.all_reduce(own(), async_op=True)).get_future().then(again)
    assert future.wait().tolist() == [2 * total() * size * size] * 4


def train(model: Any, *batches: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def same_everywhere(tensors: Any) -> bool:
    """Return whether all ranks have bitwise equal `tensors`."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    return all(torch.equal(row, flat) for row in rows)


@everywhere
def test_sparse_tensors_are_summed() -> None:
    rank = dist.get_rank()
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[rank, 5]]), torch.full((2,), 1.0 + rank), (8,), check_invariants=True
    )
    dense = own()
    works = [started(dist.all_reduce(one, async_op=True)) for one in (sparse, dense)]
    for work in reversed(works):
        work.get_future().wait()  # as torch's DistributedDataParallel does
    assert dense.tolist() == [total()] * 4
    wanted = torch.zeros(8)
    wanted[: dist.get_world_size()] = torch.arange(1.0, dist.get_world_size() + 1)
    wanted[5] = total()
    assert torch.equal(sparse.to_dense(), wanted)
    with pytest.raises(RuntimeError, match="must be SUM"):
        dist.all_reduce(torch.zeros(3).to_sparse(), dist.ReduceOp.MAX)


@everywhere
def test_compiled_functions_call_collectives() -> None:
    root = dist.get_world_size() - 1

    def steps(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor * 2
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        other = tensor + dist.get_rank()
        dist.broadcast(other, root)
        dist.barrier()
        return other + 1

    assert torch.compile(steps, backend="eager")(own()).tolist() == [2 * total() + root + 1] * 4


@everywhere
def test_compiled_ddp_with_batch_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    wrapped = DistributedDataParallel(model)
    compiled = torch.compile(wrapped, backend="eager")
    torch._logging.set_logs(dynamo=logging.ERROR)  # type: ignore[attr-defined]  # a warning of torch about its own profiler ranges
    torch.manual_seed(dist.get_rank() + 1)
    train(compiled, *torch.randn(3, 8, 6))
    assert same_everywhere(model.parameters())


@everywhere
def test_profiles_name_the_collectives() -> None:
    size = dist.get_world_size()
    with profiler_legacy.profile(record_shapes=True) as profile:
        dist.all_reduce(own())
        dist.all_gather_into_tensor(torch.empty(4 * size), own())
        dist.broadcast(own(), 0)
        dist.barrier()
    events = {event.name: event for event in profile.function_events or []}
    for name in ("all_reduce", "all_gather", "broadcast", "barrier"):
        assert f"{dist.get_backend()}:{name}" in events
    assert events["mpi4py:all_reduce"].input_shapes == [[4]]


@everywhere
def test_a_range_of_the_profiler_ends_before_its_work() -> None:
    """A thread that sees the end of the work may stop the profiler, whose memory the end of the range writes to."""
    from dualdist.mpi.work import MpiWork

    ended: list[bool] = []

    class Range:
        def set_result(self, _: None) -> None:
            ended.append(work.is_completed())

    work = MpiWork("allreduce", SimpleNamespace(seconds=30.0), [], [], result=[], range_=Range())
    assert work.is_completed()
    assert ended == [False]


@everywhere
def test_a_checkpoint_is_saved_in_the_background() -> None:
    import torch.distributed.checkpoint as dcp

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    # The calls of two threads on one group would be in another order on each rank.
    group: Any = dist.new_group()
    try:
        future: Any = dcp.async_save({"own": own()}, checkpoint_id=folder[0], process_group=group)
        dist.all_reduce(own())  # while it is being saved
        future.result()
        loaded = {"own": torch.zeros(4)}
        dcp.load(loaded, checkpoint_id=folder[0])
        assert loaded["own"].tolist() == [1.0] * 4  # rank 0 saves what all ranks have under this name
        dist.barrier()
    finally:
        shutil.rmtree(folder[0], ignore_errors=True)
