"""Commits that survive their processes: whichever files the nodes still have, all ranks resume from the same commit.

Here every rank has its own folder, as every node has. tests/launchers/test_elastic.py kills real processes.
"""

from __future__ import annotations

import errno
import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import dualdist as hvd
from dualdist.checkpoint.for_elastic import Commits
from dualdist.elastic import StateHandler, TorchState

from ..helpers.collected_warnings import warned
from ..helpers.elastic_training import handled, make_state, train_batch, weight, weight_after
from ..helpers.faulty_file_system import CountingFileSystem
from ..helpers.world import everywhere
from .test_checkpoint_failures import damage


def opened(tmp_path: Path) -> Commits:
    folder = tmp_path / str(hvd.rank())
    folder.mkdir(exist_ok=True)
    return Commits(folder, True)


def attach(state: Any, commits: Commits) -> None:
    """Do what `run` does at its start."""
    state._resume(commits)


def files(tmp_path: Path) -> list[str]:
    """Return the names of the files in the folder of this rank."""
    return sorted(path.name for path in (tmp_path / str(hvd.rank())).iterdir())


def commit_batches(tmp_path: Path, count: int) -> None:
    state = make_state(batch=0, log=[])
    attach(state, opened(tmp_path))
    for _ in range(count):
        train_batch(state)
        state.log.append(state.batch)
        state.commit()


def resumed_from(tmp_path: Path) -> Any:
    """Return the state of a new process that resumes from the commits."""
    state = make_state(batch=0, log=[])
    torch.nn.init.constant_(state.model.weight, 7.0 + hvd.rank())
    state.save()
    with warned() as warnings:
        attach(state, opened(tmp_path))
    state.warnings = warnings
    return state


@everywhere
def test_training_resumes_from_the_last_commit(tmp_path: Path) -> None:
    commit_batches(tmp_path, 3)
    state = resumed_from(tmp_path)
    state.restore()
    assert (weight(state), state.batch, state.log) == (weight_after(3), 3, [1, 2, 3])
    train_batch(state)
    state.commit()
    assert weight(state) == weight_after(4)
    assert weight(resumed_from(tmp_path)) == weight_after(4)
    assert files(tmp_path) == ["step-000000003.pt", "step-000000004.pt"]


@everywhere
def test_without_a_commit_the_state_is_unchanged(tmp_path: Path) -> None:
    state = resumed_from(tmp_path)
    assert (weight(state), state.batch, state.warnings) == (7.0 + hvd.rank(), 0, [])


@everywhere
def test_a_metric_resumes_with_the_samples_of_all_ranks_that_were_committed(tmp_path: Path) -> None:
    def updated(value: float) -> Any:
        state: Any = TorchState(mean=hvd.metrics.Mean())
        state.mean.update(torch.tensor([value]))
        return state

    state, resumed = updated(float(hvd.rank())), updated(100.0)
    attach(state, Commits(tmp_path, True))  # one folder: rank 0 alone writes
    state.commit()
    state.mean.update(torch.tensor([100.0]))
    with warned():
        attach(resumed, Commits(tmp_path, True))
    state.restore()
    for each in (state, resumed):
        assert each.mean.compute().item() == (hvd.size() - 1) / 2


@pytest.mark.ranks(2, 3)
@everywhere
def test_the_newest_commit_of_any_node_is_used(tmp_path: Path) -> None:
    commit_batches(tmp_path, 3)
    if hvd.rank() != 1:
        (tmp_path / str(hvd.rank()) / "step-000000003.pt").unlink()
    if hvd.rank() == 0:  # a new node
        (tmp_path / "0" / "step-000000002.pt").unlink()
    state = resumed_from(tmp_path)
    assert (weight(state), state.batch) == (weight_after(3), 3)
    expected = ["Resuming from commit 3, which rank 1 has read."]
    assert state.warnings == (expected if hvd.rank() == 0 else [])


@everywhere
def test_a_damaged_commit_is_passed_over(tmp_path: Path) -> None:
    commit_batches(tmp_path, 3)
    damage(tmp_path / str(hvd.rank()) / "step-000000003.pt")
    state = resumed_from(tmp_path)
    assert (weight(state), state.batch) == (weight_after(2), 2)
    assert "checksum" in state.warnings[0]


@everywhere
def test_reset_callbacks_are_called_on_resuming(tmp_path: Path) -> None:
    commit_batches(tmp_path, 1)
    batches: list[int] = []
    state = make_state(batch=0, log=[])
    state.register_reset_callbacks([lambda: batches.append(state.batch)])
    with warned():
        attach(state, opened(tmp_path))
    assert batches == [1]


@pytest.mark.ranks(2, 3)
@everywhere
def test_rank_0_writes_for_all_ranks_that_see_its_folder(tmp_path: Path) -> None:
    created = []
    system = CountingFileSystem(lambda number, name: created.append(name) if name == "create" else None)
    state = TorchState(step=1)
    attach(state, Commits(tmp_path, True))
    with system.in_use():
        state.commit()
    assert len(created) == (1 if hvd.rank() == 0 else 0)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001.pt"]


@everywhere
def test_a_full_disk_is_a_warning_and_training_continues(tmp_path: Path) -> None:
    def fail(number: int, name: str) -> None:
        if name == "write" and state.step == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state = TorchState(step=0)
    attach(state, opened(tmp_path))
    with CountingFileSystem(fail).in_use(), warned() as warnings:
        for state.step in (1, 2, 3):
            state.commit()
    (warning,) = warnings
    for word in ("Commit 2", f"rank {hvd.rank()}", "No space left", "step-000000001.pt"):
        assert word in warning
    assert files(tmp_path) == ["step-000000001.pt", "step-000000003.pt"]


@everywhere
def test_a_value_that_cannot_be_written_is_an_error_at_the_start_on_every_rank(tmp_path: Path) -> None:
    class Thing:
        pass

    state = TorchState(thing=Thing())
    with pytest.raises(TypeError, match=r"state\['thing'\].* must be a tensor.*Thing instead"):
        attach(state, opened(tmp_path))


@contextmanager
def restarted_by_torchrun(tmp_path: Path) -> Iterator[Path]:
    """Join a world whose launcher restarts all processes. Its commits are in the folder of rank 0."""
    folder = hvd.broadcast_object(str(tmp_path))
    hvd.shutdown()
    try:
        with patch.dict(os.environ, {"DUALDIST_ELASTIC_DIR": folder}), patch.object(sys, "argv", ["train"]), warned():
            hvd.init()
            yield Path(folder)
    finally:
        hvd.shutdown()
        hvd.init()


@pytest.mark.world_kinds("torch-gloo")
@everywhere
def test_one_run_after_the_other_and_one_inside_the_other(tmp_path: Path) -> None:
    @hvd.elastic.run
    def count(state: Any, inner: Any = None) -> int:
        while state.batch < 3:
            state.batch += 1
            state.commit()
        return int(state.batch if inner is None else count(inner))

    with restarted_by_torchrun(tmp_path):
        for _ in range(10):
            assert count(TorchState(batch=0)) == 3
        assert count(TorchState(batch=0), TorchState(batch=1)) == 3


@pytest.mark.world_kinds("torch-gloo")
@everywhere
def test_a_run_inside_another_with_the_same_state_keeps_their_commits_apart(tmp_path: Path) -> None:
    @hvd.elastic.run
    def inner(state: Any) -> None:
        state.batch = 1
        state.commit()

    @hvd.elastic.run
    def outer(state: Any) -> None:
        inner(state)
        state.batch = 2
        state.commit()

    with restarted_by_torchrun(tmp_path) as folder:
        with patch("dualdist.elastic.loop._numbers", itertools.count()):
            outer(TorchState(batch=0))
        hvd.barrier()
        batches = [torch.load(next(folder.glob(f"run-{number}/*")), weights_only=True)["batch"] for number in (0, 1)]
    assert batches == [2, 1]


@everywhere
def test_an_object_with_a_custom_handler_resumes_from_the_commit(tmp_path: Path) -> None:
    class ListHandler(StateHandler):
        def save(self) -> None:
            self.saved = list(self.value)

        def restore(self) -> None:
            self.value[:] = self.saved

        def sync(self) -> None:
            self.value[:] = hvd.broadcast_object(self.value)

    with handled(list, ListHandler):
        state = TorchState(log=[])
        attach(state, opened(tmp_path))
        state.log.append(1)
        state.commit()
        fresh = TorchState(log=[])
        with warned():
            attach(fresh, opened(tmp_path))
        fresh.log.append(2)
        fresh.restore()
        assert fresh.log == [1]


@everywhere
def test_a_value_that_becomes_unwritable_is_an_error_on_every_rank(tmp_path: Path) -> None:
    state = TorchState(step=0)
    tmp_path = Path(hvd.broadcast_object(str(tmp_path)))  # rank 0 writes for all
    attach(state, Commits(tmp_path, True))
    state.step = object()
    with pytest.raises(TypeError, match=r"`state\['step'\]` must be a tensor"):
        state.commit()


@pytest.mark.world_kinds("torch-gloo")
@everywhere
def test_a_failure_that_all_processes_survive_restarts_none_of_them(tmp_path: Path) -> None:
    """The world is joined with the variable that asks for commits, as under torchrun."""
    tries = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        tries.append(state.batch)
        while state.batch < 4:
            train_batch(state)
            if len(tries) == 1 and state.batch == 3:
                hvd.allreduce(torch.ones(1 + hvd.rank()))
            state.commit()

    with restarted_by_torchrun(tmp_path) as folder:
        state = make_state(batch=0)
        train(state)
    assert tries == [0, 2]
    assert weight(state) == weight_after(4)
    hvd.barrier()
    names = sorted(path.name for path in folder.glob("run-*/*"))
    assert names == ["step-000000003.pt", "step-000000004.pt"]
