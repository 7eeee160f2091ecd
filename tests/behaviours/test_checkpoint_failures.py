"""Checkpoints that fail: all ranks pass over the same files, or raise the same error."""

from __future__ import annotations

import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import dualdist as hvd
from dualdist.checkpoint import CheckpointManager, load, save, save_and_load

from ..helpers.collected_warnings import warned
from ..helpers.faulty_file_system import CountingFileSystem
from ..helpers.small_training import make_state, train
from ..helpers.world import everywhere
from .test_checkpoint import folder


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


@everywhere
def test_damaged_files_are_passed_over_by_all_ranks_with_a_warning_that_names_them(tmp_path: Path) -> None:
    state: dict[str, Any] = {"value": 0}
    with warned() as messages, CheckpointManager(folder(tmp_path), state, every_steps=1) as manager:
        for step in (1, 2, 3):
            state["value"] = step
            manager.step()
        if hvd.rank() == 0:
            damage(tmp_path / "step-000000003.pt")
            (tmp_path / "step-000000002.pt").write_bytes(b"")
        manifest = manager.restore_latest()
        assert manifest is not None and manifest.step == state["value"] == manager.steps == 1
        if hvd.rank() == 0:
            assert [name in " ".join(messages) for name in ("step-000000003.pt", "step-000000002.pt")] == [True] * 2
            damage(tmp_path / "step-000000001.pt")
        with pytest.raises(hvd.DamagedCheckpointError, match="None of the 3 checkpoints can be loaded"):
            manager.restore_latest()
        state["value"] = 2
        manager.step()  # the run continues, and replaces the damaged file of the same step
        assert manager.restore_latest() is not None and manager.steps == 2


@everywhere
def test_without_a_rated_checkpoint_damaged_ones_are_named_and_the_others_are_not_called_damaged(
    tmp_path: Path,
) -> None:
    with warned() as messages, CheckpointManager(folder(tmp_path), {"value": 0}, best=("accuracy", "max")) as manager:
        manager.save()
        manager.steps = 1
        manager.save({"accuracy": 0.5})
        if hvd.rank() == 0:
            damage(tmp_path / "step-000000001.pt")
        assert manager.restore_best() is None
        assert hvd.rank() > 0 or "step-000000001.pt" in " ".join(messages)
        assert manager.restore_latest() is not None and manager.steps == 0


@everywhere
def test_damaged_files_do_not_count_as_kept(tmp_path: Path) -> None:
    state: dict[str, Any] = {"value": 0}
    with warned(), CheckpointManager(folder(tmp_path), state, keep=2, every_steps=1) as manager:
        manager.step()
        manager.step()
        if hvd.rank() == 0:
            damage(tmp_path / "step-000000002.pt")
        assert manager.restore_latest() is not None and manager.steps == 1
        manager.steps = 10
        manager.step()
        if hvd.rank() == 0:
            names = {path.name for path in tmp_path.iterdir()}
            assert names >= {"step-000000001.pt", "step-000000011.pt"}
            damage(tmp_path / "step-000000011.pt")
        assert manager.restore_latest() is not None and manager.steps == 1


def full_disk(count: int, name: str) -> None:
    if name == "write":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("asynchronous", [False, True])
@everywhere
def test_a_full_disk_is_an_error_on_every_rank_and_the_run_can_continue(asynchronous: bool, tmp_path: Path) -> None:
    manager = CheckpointManager(folder(tmp_path), {"value": 1}, every_steps=2, asynchronous=asynchronous)
    manager.step()
    manager.step()
    manager.wait()
    manager.step()
    message = r"step 4 was not saved: .*No space left on device.* complete checkpoint is that of step 2, .*02\.pt"
    with CountingFileSystem(full_disk).in_use(), pytest.raises(hvd.CheckpointError, match=message):
        manager.step()
        manager.wait()
    manager.step()
    assert manager.step() is True
    manager.close()
    assert manager.restore_latest() is not None and manager.steps == 6
    if hvd.rank() == 0:
        assert sorted(os.listdir(tmp_path))[1:] == ["step-000000002.pt", "step-000000006.pt"]


@everywhere
def test_an_asynchronous_failure_is_raised_by_the_next_step_on_every_rank(tmp_path: Path) -> None:
    with CheckpointManager(folder(tmp_path), {}, asynchronous=True) as manager:
        with CountingFileSystem(full_disk).in_use():
            manager.save()
            if manager._saving is not None:
                manager._saving.exception()  # waits for it
        with pytest.raises(hvd.CheckpointError, match=r"No space left on device\. No checkpoint is complete"):
            manager.step()
        manager.step()


class Broken:
    def __init__(self, rank: int, *, per_rank: bool = False) -> None:
        self.rank, self.per_rank = rank, per_rank

    def state_dict(self) -> dict[str, Any]:
        if hvd.rank() == self.rank:
            raise RuntimeError("the reason")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state_dict()


@everywhere
def test_an_object_that_cannot_be_saved_or_loaded_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    path = folder(tmp_path) / "a.pt"
    last = hvd.size() - 1
    with pytest.raises(hvd.CheckpointError, match="Rank 0 failed: RuntimeError: the reason"):
        save(path, {"a": Broken(0)})
    with pytest.raises(hvd.CheckpointError, match=f"Rank {last} failed: RuntimeError: the reason"):
        save(path, {"a": Broken(last, per_rank=True)})
    with pytest.raises(hvd.CheckpointError, match=r"Rank 0 failed: TypeError: `state\['a'\]` must be a tensor"):
        save(path, {"a": object()})
    save(path, {"a": Broken(-1)})
    with warned(), pytest.raises(hvd.CheckpointError, match=r"`a` could not load its state from .*the reason"):
        load(path, {"a": Broken(last)})
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@everywhere
def test_a_state_of_every_rank_that_one_cannot_copy_is_an_error_on_all(tmp_path: Path) -> None:
    def collect(*args: object) -> None:
        raise MemoryError("no memory")

    last = hvd.size() - 1
    with pytest.MonkeyPatch.context() as patch:
        if hvd.rank() == last:
            patch.setattr(save_and_load, "collect", collect)
        with pytest.raises(hvd.CheckpointError, match=f"Rank {last} failed: MemoryError: no memory"):
            save(tmp_path / "file.pt", {"value": hvd.rank()})


class Refusing:
    """Raises on the last rank when it loads a state whose `taken` is not 0."""

    taken = 0

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]
        if self.taken and hvd.rank() == hvd.size() - 1:
            raise RuntimeError("the reason")


class RefusingModule(torch.nn.Linear):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if hvd.rank() == hvd.size() - 1:
            raise RuntimeError("the reason")
        return super().load_state_dict(*args, **kwargs)


@pytest.mark.parametrize("late", [False, True], ids=["object", "module"])
@everywhere
def test_a_state_that_one_rank_cannot_load_changes_no_rank(late: bool, tmp_path: Path) -> None:
    path = folder(tmp_path) / "a.pt"
    state: dict[str, Any] = {**make_state("optimizer"), "epoch": 1, "refusing": Refusing(), "z": torch.nn.Linear(1, 1)}
    train(state, 2)
    state["refusing"].taken = 0 if late else 1
    save(path, state)
    fresh = {**make_state("optimizer", seed=3), "epoch": 7, "refusing": Refusing()}
    fresh["z"] = RefusingModule(1, 1) if late else torch.nn.Linear(1, 1)

    def described() -> str:
        modules = () if late else ("model", "z")
        return repr(
            [
                value.state_dict() if hasattr(value, "state_dict") else value
                for name, value in fresh.items()
                if name in modules or not isinstance(value, torch.nn.Module)
            ]
        )

    before = described()
    with pytest.raises(hvd.CheckpointError, match=f"`{'z' if late else 'refusing'}` could not load its state"):
        load(path, fresh)
    assert described() == before


@pytest.mark.ranks(2, 3)
@everywhere
def test_names_that_differ_between_ranks_are_an_error_on_every_rank(tmp_path: Path) -> None:
    state = {"epoch": 1} | ({"extra": 2} if hvd.rank() == hvd.size() - 1 else {})
    with pytest.raises(ValueError, match=r"must have the same names on all ranks, .* differ in extra"):
        save(folder(tmp_path) / "a.pt", state)
    assert not (tmp_path / "a.pt").exists()


@everywhere
def test_a_missing_or_mismatched_file_is_an_error_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(hvd.CheckpointError, match=r"`path` could not be read.*No such file"):
        load(folder(tmp_path) / "a.pt")
    save(folder(tmp_path) / "a.pt", {"model": torch.nn.Linear(2, 2)})
    with pytest.raises(hvd.CheckpointError, match=r"`model` has 2 of another shape \(weight: \(2, 2\) instead of"):
        load(folder(tmp_path) / "a.pt", {"model": torch.nn.Linear(3, 3)})
    if hvd.rank() == 0:
        damage(tmp_path / "a.pt")
    with pytest.raises(hvd.DamagedCheckpointError, match="checksum"):
        load(folder(tmp_path) / "a.pt")
    with pytest.raises(hvd.CheckpointError, match=r"not saved: .*No such file or directory.* is unchanged"):
        save(folder(tmp_path) / "missing" / "a.pt", {})


@everywhere
def test_a_checkpoint_that_is_gone_is_not_named(tmp_path: Path) -> None:
    run = folder(tmp_path) / "run"
    with CheckpointManager(run, {"epoch": 1}, every_steps=1) as manager:
        manager.step()
        if hvd.rank() == 0:
            shutil.rmtree(run)
        hvd.barrier()
        with pytest.raises(hvd.CheckpointError, match=r"was not saved: .* No checkpoint is complete in"):
            manager.step()


@pytest.mark.parametrize("sharded", [False, True])
@everywhere
def test_a_second_job_in_the_folder_is_an_error_of_the_first_on_every_rank(sharded: bool, tmp_path: Path) -> None:
    def managed(job: str) -> CheckpointManager:
        manager = CheckpointManager(tmp_path, {"epoch": 0}, keep=None, signals=(), sharded=sharded)
        manager._catalog._job = job
        return manager

    def save(manager: CheckpointManager, step: int) -> None:
        manager.steps = step
        manager.save()

    first, second = managed("the first"), managed("the second")
    save(first, 1)
    assert second.restore_latest() is not None
    save(first, 2)  # the other one has only read
    save(second, 3)
    for _ in range(2):
        with pytest.raises(hvd.CheckpointError, match=rf"another one saves into {tmp_path}, too: the second\."):
            save(first, 4)
    save(second, 5)
    third = managed("the first")  # as when a job is started again
    save(third, 6)
    save(first, 7)
    for manager in (first, second, third):
        manager.close()


@everywhere
def test_options_that_are_wrong_or_differ_are_an_error_on_every_rank(tmp_path: Path) -> None:
    last = hvd.rank() == hvd.size() - 1
    with pytest.raises((ValueError, hvd.CheckpointError), match="`keep` must be at least 1 or None, but is 0"):
        CheckpointManager(folder(tmp_path), {}, keep=0 if last else 1)
    with pytest.raises((ValueError, hvd.CheckpointError), match="`directory` must be a path, but is 'a"):
        CheckpointManager("a\0b" if last else folder(tmp_path), {})
    for options in ({"keep_best": 2}, {"keep_best": 0, "best": ("accuracy", "max")}):
        with pytest.raises((ValueError, hvd.CheckpointError), match="`keep_best` must be "):
            CheckpointManager(folder(tmp_path), {}, **options)
    for best in ("accuracy", ("accuracy", "high"), ("accuracy",), 3):
        with pytest.raises((ValueError, hvd.CheckpointError), match="`best` must be a metric and 'max' or 'min'"):
            CheckpointManager(folder(tmp_path), {}, best=best)  # type: ignore[arg-type]
    with pytest.raises((TypeError, hvd.CheckpointError), match=r"`model` must be a torch\.nn\.Module, but is a"):
        hvd.checkpoint.export_weights(tmp_path / "a.pt", {} if last else torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises((TypeError, hvd.CheckpointError), match="`state` must be a dictionary from names"):
        CheckpointManager(folder(tmp_path), [] if last else {})  # type: ignore[arg-type]
    with pytest.raises(hvd.CheckpointError, match=r"`directory` must be a folder that can be used, but .*Errno"):
        CheckpointManager("/dev/null/not-here", {})
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises((ValueError, hvd.CheckpointError), match=r"`signals` must be \(\) outside the main thread"),
    ):
        if last:
            pool.submit(CheckpointManager, tmp_path, {}).result()
        CheckpointManager(folder(tmp_path), {})
    if hvd.size() > 1:
        with pytest.raises(ValueError, match="must be equal on all ranks"):
            CheckpointManager(folder(tmp_path), {}, every_steps=1 + last)
