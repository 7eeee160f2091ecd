"""The process group over mpi4py makes progress while no thread waits, and ends calls that a rank never joins."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ..helpers.world import everywhere

pytestmark = pytest.mark.world_kinds("torch-mpi")

SECONDS = 30.0


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


@everywhere
def test_a_future_completes_while_this_thread_does_something_else() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((1 << 20,), rank + 1.0)
    if rank == size - 1:
        store().get("begun 0")
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    future = work.get_future()
    if rank == 0:
        assert not future.done() and not work.is_completed()
        store().set("begun 0", "")
    done = threading.Event()
    future.add_done_callback(lambda known: done.set())
    assert done.wait(SECONDS)  # this thread does not call MPI
    assert future.value()[0][0].item() == size * (size + 1) / 2
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert future.then(lambda known: known.value()[0].sum()).wait() == (1 << 20) * size * (size + 1) / 2
    dist.barrier()
    if rank == 0:
        store().delete_key("begun 0")


@everywhere
def test_works_without_references_are_finished() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((1 << 12,), float(rank)).to(torch.bfloat16) for _ in range(20)]
    futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]
    for future in futures:
        future.wait()
    assert all(tensor[0].item() == size * (size - 1) / 2 for tensor in tensors)


@everywhere
def test_a_missing_member_is_an_error_after_the_timeout() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    hasty = dist.new_group(timeout=timedelta(seconds=0.2))
    assert isinstance(hasty, dist.ProcessGroup)
    tensor = torch.ones(3)
    if rank == 0:
        expected = f"MPI: allreduce failed on rank 0 of {size} in group .* timed out after 0.2 s"
        with pytest.raises(RuntimeError, match=expected):
            dist.all_reduce(tensor, group=hasty)
        work = dist.broadcast(tensor, 1, group=hasty, async_op=True)
        assert work is not None
        with pytest.raises(RuntimeError, match="MPI: broadcast failed on rank 0"):
            work.get_future().wait()
        assert isinstance(work.exception(), RuntimeError) and not work.is_success()
        with pytest.raises(RuntimeError, match=r"barrier failed .* timed out after 0\.1 s"):
            dist.barrier(group=hasty, timeout=timedelta(seconds=0.1))
        with pytest.raises(RuntimeError, match=r"recv from 1 timed out after 0\.1 s"):
            hasty.recv([tensor], 1, 0).wait(timedelta(seconds=0.1))
    dist.destroy_process_group(hasty)
    if rank == 0:
        with pytest.raises(RuntimeError, match="was destroyed"):
            hasty.allreduce([tensor])
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(size)] * 3


@everywhere
def test_a_group_that_is_destroyed_ends_its_calls_first() -> None:
    """As gloo does. The end of MPI would wait for calls that are given up, perhaps for ever."""
    size = dist.get_world_size()
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    tensors = [torch.ones(1 << 20) for _ in range(2)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    dist.destroy_process_group(group)
    assert all(work is not None and work.is_success() for work in works)
    assert all(tensor.eq(size).all() for tensor in tensors)


@everywhere
def test_torchs_own_ddp_has_the_gradients_of_one_process() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    data = torch.randn(2, 4 * size, 6, generator=torch.Generator().manual_seed(1)).double()
    for is_static in (False, True):
        torch.manual_seed(0)
        single = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 3)).double()
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 3)).double()
        parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001, static_graph=is_static)
        single.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        for batch in data:
            for module, rows in ((single, batch), (parallel, batch.chunk(size)[rank])):
                module.zero_grad()
                module(rows).square().mean().backward()
            for ours, wanted in zip(model.parameters(), single.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, wanted.grad, rtol=1e-12, atol=1e-12)


def error_in_a_fork() -> str:
    """Return the error of a forked child that uses the group. It ends as a script does, with its exit handlers."""
    import atexit

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        atexit._run_exitfuncs()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return text


@everywhere
def test_a_forked_child_that_uses_the_group_gets_an_error() -> None:
    assert "is used in a forked child instead" in error_in_a_fork()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == dist.get_world_size()
