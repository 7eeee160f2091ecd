"""A process that is forked from a rank: calls that communicate raise there, and the ranks are not disturbed."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dualdist as hvd

from ..helpers.ranks import check_next_calls_work
from ..helpers.world import everywhere

T = TypeVar("T")

SECONDS = 30


def in_fork(function: Callable[[], T]) -> T:
    """Return what `function` returns in a forked process."""
    context = multiprocessing.get_context("fork")
    reading, writing = context.Pipe(duplex=False)
    child = context.Process(target=lambda: writing.send(function()))
    child.start()
    writing.close()
    try:
        assert reading.poll(SECONDS), "the forked process did not answer"
        result: T = reading.recv()
    finally:
        child.join(SECONDS)
    assert child.exitcode == 0
    return result


def error_of(call: Callable[[], object]) -> str:
    """Return the message of the NotInitializedError that `call` raises; without one, what happened instead."""
    try:
        return f"returned {call()}"
    except hvd.NotInitializedError as error:
        return str(error)
    except Exception as error:
        return f"raised {error!r}"


def init_after_shutdown() -> None:
    hvd.shutdown()
    hvd.init()


def calls(folder: Path) -> dict[str, Callable[[], object]]:
    """Return calls that communicate, with what they need from before the fork. Collective."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)
    module = hvd.DistributedDataParallel(nn.Linear(2, 2))
    norm = hvd.SyncBatchNorm(2)
    ones, pending = torch.ones(2), hvd.allreduce_async(torch.ones(5000))
    added = hvd.add_process_set([0]) if hvd.size() > 1 else hvd.global_process_set
    return {
        "allreduce": lambda: hvd.allreduce(ones),
        "allreduce_": lambda: hvd.allreduce_(torch.ones(5000)),
        "allreduce_async": lambda: hvd.allreduce_async(ones, name="loss"),
        "grouped_allreduce": lambda: hvd.grouped_allreduce([ones]),
        "sparse_allreduce_async": lambda: hvd.sparse_allreduce_async(ones.to_sparse(), "x", hvd.Sum),
        "allgather": lambda: hvd.allgather(ones),
        "broadcast": lambda: hvd.broadcast(ones, 0),
        "alltoall": lambda: hvd.alltoall(torch.ones(6)),
        "reducescatter": lambda: hvd.reducescatter(torch.ones(6)),
        "reduce": lambda: hvd.reduce(ones, 0),
        "gather": lambda: hvd.gather(ones, 0),
        "scatter": lambda: hvd.scatter(torch.ones(6), 0),
        "broadcast_object": lambda: hvd.broadcast_object(1, 0),
        "allgather_object": lambda: hvd.allgather_object(1),
        "broadcast_parameters": lambda: hvd.broadcast_parameters({"x": ones}, 0),
        "broadcast_optimizer_state": lambda: hvd.broadcast_optimizer_state(other, 0),
        "barrier": hvd.barrier,
        "join": hvd.join,
        "poll": lambda: hvd.poll(pending),
        "synchronize": lambda: hvd.synchronize(pending),
        "add_process_set": lambda: hvd.add_process_set([0, 1]),
        "remove_process_set": lambda: hvd.remove_process_set(added),
        "DistributedOptimizer": lambda: hvd.DistributedOptimizer(other),
        "DistributedDataParallel": lambda: hvd.DistributedDataParallel(nn.Linear(2, 2)),
        "backward": weight.sum().backward,
        "step": lambda: (weight.sum().backward(), optimizer.step()),
        "backward of a module": lambda: module(torch.ones(1, 2)).sum().backward(),
        "SyncBatchNorm": lambda: norm(torch.ones(4, 2)),
        "checkpoint": lambda: hvd.checkpoint.save(folder / "x", {"model": module}),
        "start_timeline": lambda: hvd.start_timeline(folder / "trace"),
        "init": hvd.init,
        "init after shutdown": init_after_shutdown,
    }


@everywhere
def test_calls_that_communicate_raise_in_a_forked_process_and_the_ranks_continue(tmp_path: Path) -> None:
    made = calls(tmp_path)
    if hvd.rank() == 0:
        errors = in_fork(lambda: {name: error_of(call) for name, call in made.items()})
        start = f"This process was forked from rank 0 (process {os.getpid()})"
        assert {name: text for name, text in errors.items() if not text.startswith(start)} == {}
        assert all("dualdist.spawn" in text and "DataLoader" in text for text in errors.values())
        assert list(tmp_path.iterdir()) == []
    made["synchronize"]()
    if hvd.size() > 1:
        made["remove_process_set"]()
    check_next_calls_work()


class Deleted:
    """An object in a reference cycle. It notes whether it is deleted, as a group of C++ would end its threads."""

    def __init__(self, notes: list[int]) -> None:
        self._notes, self._own = notes, self

    def __del__(self) -> None:
        self._notes.append(os.getpid())


@everywhere
def test_what_a_rank_would_have_collected_is_not_collected_in_a_forked_process() -> None:
    notes: list[int] = []

    def collect() -> list[int]:
        gc.collect()
        return notes

    gc.disable()
    try:
        Deleted(notes)
        assert in_fork(collect) == []
    finally:
        gc.enable()
    assert collect() == [os.getpid()]
    check_next_calls_work()


@everywhere
def test_what_a_forked_process_writes_to_gradients_stays_there() -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    (weight * (hvd.rank() + 1)).sum().backward()
    grad, mean = weight.grad, (hvd.size() + 1) / 2
    assert grad is not None
    assert in_fork(lambda: grad.mul_(100).unique().tolist()) == [100 * mean]
    assert in_fork(lambda: [grad.mul_(100), in_fork(lambda: grad.mul_(2).tolist())][1]) == [200 * mean] * 3
    assert grad.unique().tolist() == [mean]
    optimizer.step()
    check_next_calls_work()
    hvd.shutdown()
    assert in_fork(lambda: grad.mul_(100).unique().tolist()) == [100 * mean]
    hvd.init()
    assert grad.unique().tolist() == [mean]


@everywhere
def test_asynchronous_calls_outlive_a_fork() -> None:
    handle = hvd.allreduce_async(torch.ones(100_000), op=hvd.Sum)
    in_fork(lambda: None)
    assert hvd.synchronize(handle).sum().item() == 100_000 * hvd.size()


def numbers() -> tuple[object, ...]:
    world = hvd.global_process_set
    return (
        *(hvd.is_initialized(), hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()),
        *(hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous(), hvd.backend_name(), hvd.transport_name()),
        *(hvd.launcher_name(), hvd.gloo_enabled(), str(hvd.device())),
        *(world.ranks, world.rank(), world.size(), world.included()),
        *(list(hvd.DistributedSampler(range(12))), list(hvd.split_by_rank(range(9)))),
    )


def numbers_after_shutdown() -> tuple[object, ...]:
    hvd.shutdown()
    return numbers()


@everywhere
def test_numbers_and_samplers_answer_in_a_forked_process() -> None:
    assert in_fork(numbers) == numbers()
    assert in_fork(lambda: in_fork(numbers)) == numbers()
    assert in_fork(numbers_after_shutdown) == numbers()
    check_next_calls_work()


class RankDataset(Dataset[int]):
    """Items that name the rank; with `wrong`, each needs a collective."""

    def __init__(self, wrong: bool) -> None:
        self.wrong = wrong

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if self.wrong:
            hvd.allreduce(torch.ones(1))
        return 100 * hvd.rank() + index


@everywhere
def test_workers_of_a_loader_know_their_rank() -> None:
    loader = DataLoader(RankDataset(wrong=False), num_workers=2, multiprocessing_context="fork")
    assert [item.item() for item in loader] == [100 * hvd.rank() + index for index in range(8)]
    check_next_calls_work()


@everywhere
def test_a_collective_in_a_worker_of_a_loader_is_a_clear_error() -> None:
    loader = DataLoader(RankDataset(wrong=True), num_workers=2, multiprocessing_context="fork")
    iterator = iter(loader)
    assert f"forked from rank {hvd.rank()} (process" in error_of(lambda: list(iterator))
    # Its error is in a cycle with it. When that is found to be garbage, the workers take 10 s to end, in another test.
    iterator._shutdown_workers()  # type: ignore[attr-defined]
    check_next_calls_work()


def sockets() -> set[str]:
    """Return the sockets of this process that are connected."""
    files = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return {os.readlink(file) for file in files if file.is_symlink() and "socket" in os.readlink(file)}


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_forked_process_does_not_hold_the_connections_of_the_agreement() -> None:
    assert sockets() - in_fork(sockets)
    check_next_calls_work()
