"""A rank that gives up a call after a failure. No transport notices it, but the others raise soon, and know why."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dualdist as hvd
from dualdist.core.backends.base import Group, Work
from dualdist.core.world import channel_of, current

from ..helpers.files import wait_for
from ..helpers.ranks import check_next_calls_work
from ..helpers.rejoining import outside_world, rejoin
from ..helpers.world import World, everywhere


def fail_on_rank_0(group: Group) -> None:
    """Let the reductions and broadcasts of `group` fail on rank 0 before they start."""

    def fail(*args: Any, **kwargs: Any) -> Work:
        raise hvd.HorovodInternalError("the cable is cut")

    if hvd.rank() == 0:
        group.allreduce_ = group.broadcast_ = fail  # type: ignore[method-assign]


def errors_where_rank_0_fails(folder: Path) -> list[str]:
    """Rank 0 stays in the world until the others have raised: when it leaves, Horovod ends their operations."""
    errors = []
    for where in ("reduction", "broadcast", "gradients"):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(3000))], lr=1.0))
        channel = channel_of(hvd.global_process_set)
        fail_on_rank_0(channel.gradients if where == "gradients" else channel.group)
        with pytest.raises(hvd.HorovodInternalError) as caught:
            if where == "reduction":
                hvd.allreduce_(torch.ones(5000))
            elif where == "broadcast":
                hvd.broadcast_(torch.ones(50_000), 0)
            else:
                optimizer.param_groups[0]["params"][0].sum().backward()
        errors.append(str(caught.value))
        (folder / f"{where} {hvd.rank()}").touch()
        wait_for(folder / f"{where} {rank}" for rank in range(hvd.size()))
        rejoin()
        check_next_calls_work()
    return errors


@pytest.mark.ranks(3)
def test_ranks_raise_soon_when_another_has_given_up_the_call(world: World, tmp_path: Path) -> None:
    failed, *others = world.run(errors_where_rank_0_fails, tmp_path)
    assert all("the cable is cut" in error for error in failed)
    assert all("failed: " in error for errors in others for error in errors), others


@pytest.mark.ranks(3)
@everywhere
def test_the_rank_that_ended_first_is_the_only_cause_also_for_ranks_that_look_later(tmp_path: Path) -> None:
    """Rank 2 leaves the world, then rank 1 ends because of it; only afterwards rank 0 makes its call."""
    ended, rank = [tmp_path / str(rank) for rank in range(3)], hvd.rank()
    with outside_world() if rank == 2 else contextlib.nullcontext():
        if rank != 2:
            wait_for([ended[rank + 1]])
            with pytest.raises(hvd.HorovodInternalError) as caught:
                hvd.allreduce(torch.ones(5000))
            current().observation.leave()  # as at the end of the process, after which Horovod's Gloo aborts rank 0
        ended[rank].touch()
        wait_for(ended)
    if rank != 2:
        rejoin()
        error = str(caught.value)
        first, cause, *others = error.splitlines()
        assert "failed: the cause is rank 2. " in first and first.endswith("missing ranks: [2].")
        assert cause == "  rank 2: process ended, or called shutdown()"
        assert others[-1].startswith("  rank 1: ended because of rank 2, in allreduce(") == (rank == 0)
    check_next_calls_work()


@pytest.mark.only_ci
@pytest.mark.ranks(2)
@pytest.mark.world_kinds("torch-mpi")
@everywhere
def test_messages_of_a_collective_given_up_do_not_reach_a_later_communicator() -> None:
    """Open MPI gives the number of a communicator that was freed to the next one."""
    for _ in range(2):  # the second communicator gets the number of the first one
        if hvd.rank() != 0:
            dist.all_reduce(torch.ones(3), async_op=True)
        rejoin()
        alone = hvd.add_process_set([0])
        dist.barrier()
        hvd.remove_process_set(alone)
        check_next_calls_work()
