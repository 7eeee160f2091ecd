"""Checkpoints on every backend: what is saved and kept, and how a run resumes from it.

    python -m tests.behaviours.test_checkpoint

records tests/data/checkpoints again: what two ranks save in the second epoch, on torch in both styles and on Horovod.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import random
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import dualdist as hvd
from dualdist.checkpoint import CheckpointManager, Preempted, format, load, read_manifest, save

from ..helpers.collected_warnings import warned
from ..helpers.faulty_file_system import CountingFileSystem
from ..helpers.small_training import make_state, plain_losses, train
from ..helpers.styles import STYLES
from ..helpers.world import WORLDS, everywhere, started

RECORDED = Path(__file__).parents[1] / "data" / "checkpoints"
SAVERS = {
    "torch-ddp": ("torch-gloo-2", "module"),
    "torch-optimizer": ("torch-gloo-2", "optimizer"),
    "horovod-optimizer": ("horovod-gloo-2", "optimizer"),
}
SECONDS = 30
FORK = multiprocessing.get_context("fork")
SAVED_STEPS, MORE_STEPS = 6, 5
"""An epoch has 4 steps: the save is inside the second, and the later steps reach into the third."""


def folder(tmp_path: Path) -> Path:
    """Return the folder on rank 0, and a path that cannot be used on the others."""
    return tmp_path if hvd.rank() == 0 else Path("/dev/null/not-here")


def steps_in(folder: Path) -> list[int]:
    """Return the steps whose checkpoints are in `folder`, which has nothing else but a note of the job."""
    return [int(name[5:14]) for name in sorted({*os.listdir(folder)} - {".dualdist-owner"})]


def record(path: Path, style: str) -> None:
    state = make_state(style)
    train(state, SAVED_STEPS)
    save(path, state, step=SAVED_STEPS)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("saver", SAVERS)
@everywhere
def test_a_resumed_run_equals_an_uninterrupted_one_for_every_saver(saver: str, style: str) -> None:
    state = make_state(style, seed=2 + hvd.rank())
    load(folder(RECORDED) / f"{saver}.pt", state)
    assert train(state, MORE_STEPS) == pytest.approx(
        plain_losses(SAVED_STEPS + MORE_STEPS)[SAVED_STEPS:], rel=0, abs=1e-6
    )
    assert len(state["losses"]) == SAVED_STEPS + MORE_STEPS


@pytest.mark.parametrize("style", STYLES)
@everywhere
def test_every_world_and_style_saves_what_was_recorded(style: str, tmp_path: Path) -> None:
    record(folder(tmp_path) / "a.pt", style)
    found, expected = (
        flat(load(path)) for path in (folder(tmp_path) / "a.pt", folder(RECORDED) / "horovod-optimizer.pt")
    )
    if "_is_initial" not in plain_scheduler().state_dict():  # of a torch older than the one that recorded
        del expected[".scheduler._is_initial"]
        found.pop(".scheduler.verbose", None)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    if hvd.rank() == 0:
        manifest = read_manifest(tmp_path / "a.pt")
        assert (manifest.step, manifest.world_size) == (SAVED_STEPS, hvd.size())
        assert (manifest.backend, manifest.transport) == (hvd.backend_name(), hvd.transport_name())


def plain_scheduler() -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)]), step_size=2)


def flat(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Return every number and tensor in `value`, by its path."""
    if isinstance(value, dict):
        return {key: t for k, v in value.items() for key, t in flat(v, f"{name}.{k}").items()}
    if isinstance(value, list | tuple):
        return flat(dict(enumerate(value)), name)
    return {name: torch.as_tensor(value)} if isinstance(value, torch.Tensor | int | float) else {}


def file_of(tensor: torch.Tensor) -> int:
    """Return the inode of the file that is mapped where `tensor` is."""
    for row in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, inode, *_ = row.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        if start <= tensor.data_ptr() < end:
            return int(inode)
    raise LookupError("no mapping holds the tensor")


@pytest.mark.parametrize("is_hidden", [False, True])
@everywhere
def test_a_host_holds_one_copy_of_a_loaded_file(is_hidden: bool, tmp_path: Path) -> None:
    path, weight = folder(tmp_path) / "a.pt", torch.arange(100_000.0)
    save(path, {"weight": weight})
    with pytest.MonkeyPatch.context() as patch:
        if is_hidden:  # a container hides the processes of others
            patch.setattr(format.MemoryFile, "become", lambda file, path, status: False)
        found = load(path)["weight"]
    assert len(set(hvd.allgather_object(file_of(found)))) == (hvd.size() if is_hidden else 1)
    found += hvd.rank()  # changes the copy of this rank
    hvd.barrier()
    torch.testing.assert_close(found, weight + hvd.rank(), rtol=0, atol=0)


@pytest.mark.parametrize("asynchronous", [False, True])
@everywhere
def test_the_last_checkpoint_is_restored_inside_an_epoch(asynchronous: bool, tmp_path: Path) -> None:
    state = make_state("optimizer")
    with CheckpointManager(folder(tmp_path), state, keep=2, every_steps=2, asynchronous=asynchronous) as manager:
        assert manager.restore_latest() is None
        train(state, 7, manager.step)
    if hvd.rank() == 0:
        assert steps_in(tmp_path) == [4, 6]
    fresh = make_state("module", seed=3)
    with CheckpointManager(folder(tmp_path), fresh, every_steps=2) as manager:
        manifest = manager.restore_latest()
        assert manifest is not None and manifest.step == manager.steps == 6
        assert train(fresh, 5, manager.step) == pytest.approx(plain_losses(11)[6:], rel=0, abs=1e-6)


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


@everywhere
def test_every_rank_restores_its_own_random_numbers(tmp_path: Path) -> None:
    torch.manual_seed(hvd.rank())
    random.seed(hvd.rank())
    np.random.seed(hvd.rank())
    with CheckpointManager(folder(tmp_path), {}) as manager:
        manager.save()
        expected = draws()
        draws()
        manager.restore_latest()
        assert draws() == expected
    assert len({tuple(numbers) for numbers in hvd.allgather_object(expected)}) == hvd.size()


class Position:
    """Where this rank is in its own stream of data. Its state is that of an iterable dataset."""

    def __init__(self) -> None:
        self.read: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]


class OfRank0(Position):
    per_rank = False


@everywhere
def test_what_differs_between_ranks_is_restored_on_each_except_for_losses_and_times(tmp_path: Path) -> None:
    rank, last = hvd.rank(), hvd.rank() == hvd.size() - 1
    state: dict[str, Any] = {"buffer": Position(), "data": Position(), "equal": Position(), "of 0": OfRank0()}
    state |= {"seen": [rank], "only on 0": Position() if rank == 0 else None}
    state |= {"history": [{"loss": 2.0 + rank, "seconds": np.float32(rank)}], "loss": torch.tensor(rank + 0.5)}
    with warned() as messages, CheckpointManager(folder(tmp_path), state) as manager:
        state["buffer"].read = torch.arange(3.0) if last else torch.zeros(3)
        state["data"].read = state["of 0"].read = 10 + rank
        state["equal"].read = {"b": torch.ones(2), "a": {1, 2}} if last else {"a": {2, 1}, "b": torch.ones(2)}
        manager.save()
        state["data"].read = state["equal"].read = state["buffer"].read = state["seen"] = None
        state["history"] = state["loss"] = None
        assert manager.restore_latest() is not None
    assert state["buffer"].read.tolist() == ([0, 1, 2] if last else [0, 0, 0])
    assert (state["data"].read, state["seen"], state["of 0"].read) == (10 + rank, [rank], 10)
    assert (state["history"], state["loss"].item()) == ([{"loss": 2.0, "seconds": 0.0}], 0.5)
    assert state["equal"].read["a"] == {1, 2} and (state["only on 0"] is None) == (rank > 0)
    if hvd.size() > 1 and rank == 0:
        assert [message.split(" differs between ranks")[0] for message in messages] == [
            "`buffer`, `data`, `only on 0`, and 1 more"
        ]
        assert load_file(tmp_path / "step-000000000.pt")["equal"].keys() == {"read"}


def load_file(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = torch.load(path, weights_only=True)
    return values


@everywhere
def test_a_save_after_restoring_an_older_file_is_the_latest(tmp_path: Path) -> None:
    state: dict[str, Any] = {"value": 0}
    with CheckpointManager(folder(tmp_path), state, every_steps=1) as manager:
        for step in (1, 2, 3):
            state["value"] = step
            manager.step()
        manager.restore(folder(tmp_path) / "step-000000001.pt")
        assert (manager.steps, state["value"]) == (1, 1)
        state["value"] = "again"
        manager.step()
    with CheckpointManager(folder(tmp_path), state) as manager:
        assert manager.restore_latest() is not None
        assert (manager.steps, state["value"]) == (2, "again")


@everywhere
def test_the_best_is_kept_and_restored(tmp_path: Path) -> None:
    state: dict[str, Any] = {"value": 0}
    accuracies = [0.5, float("nan"), 0.75, 0.625, 0.25]
    with CheckpointManager(folder(tmp_path), state, keep=1, best=("accuracy", "max")) as manager:
        for accuracy in accuracies:
            manager.step()
            state["value"] = accuracy
            manager.save({"accuracy": accuracy})
        if hvd.rank() == 0:
            assert steps_in(tmp_path) == [3, 5]
        assert manager.restore_best() is not None
        assert (state["value"], manager.steps) == (0.75, 3)
        assert manager.restore_latest() is not None and state["value"] == 0.25


@everywhere
def test_several_of_the_best_are_kept_also_after_a_rollback(tmp_path: Path) -> None:
    options: Any = {"keep": 1, "best": ("accuracy", "max"), "keep_best": 2}
    with CheckpointManager(folder(tmp_path), {"value": 0}, **options) as manager:

        def save(*accuracies: float) -> list[int]:
            for accuracy in accuracies:
                manager.step()
                manager.save({"accuracy": accuracy})
            return steps_in(tmp_path) if hvd.rank() == 0 else []

        kept = [save(0.75, 0.75, 0.75), save(float("nan"), 0.25, 0.5)]  # of equal ones, the later is better
        manager.restore(folder(tmp_path) / "step-000000002.pt")
        kept += [save(0.125), save(0.25)]  # step 3 again
    assert kept == ([[2, 3], [2, 3, 6], [2, 3, 6], [2, 4, 6]] if hvd.rank() == 0 else [[]] * 4)


@everywhere
def test_the_model_alone_is_loaded_strictly(tmp_path: Path) -> None:
    whole: dict[str, Any] = {"model": torch.nn.Linear(2, 1), "epochs": 3}
    whole["optimizer"] = torch.optim.SGD(whole["model"].parameters(), lr=0.5)
    with CheckpointManager(folder(tmp_path), whole, every_steps=1) as manager:
        manager.step()
    path, model = folder(tmp_path) / "step-000000001.pt", torch.nn.Linear(2, 1)
    with pytest.raises(hvd.CheckpointError, match=r"it has `.*, which the state does not have"):
        load(path, {"model": model})
    with warned() as messages:
        load(path, {"model": model}, partial=True)
    assert torch.equal(model.weight, whole["model"].weight) and not messages
    model = torch.nn.Linear(2, 1)
    with CheckpointManager(folder(tmp_path), {"model": model}, random_state=False) as manager:
        assert manager.restore_latest(partial=True) is not None and manager.steps == 1
    assert torch.equal(model.weight, whole["model"].weight)
    for state, text in (
        ({"model": torch.nn.Sequential(model)}, r"`model` has 2 missing .* and 2 unexpected"),
        ({"model": torch.nn.Linear(3, 1)}, r"`model` has 1 of another shape"),
        ({"model": model, "ema": model}, r"it has no `ema`"),
    ):
        with pytest.raises(hvd.CheckpointError, match=text):
            load(path, state, partial=True)


@everywhere
def test_a_metric_that_is_nan_does_not_replace_a_number(tmp_path: Path) -> None:
    state: dict[str, Any] = {"value": 1}
    with warned() as messages, CheckpointManager(folder(tmp_path), state, best=("loss", "min")) as manager:
        manager.save({"loss": 0.5})
        state["value"] = 2
        manager.save({"loss": float("nan")})
        assert manager.restore_best() is not None and state["value"] == 1
        state["value"] = 3
        manager.save({"loss": 0.75})
        assert manager.restore_latest() is not None and state["value"] == 3
    text = "The checkpoint of step 0 was not replaced: loss is a number there, but NaN now."
    assert [message.startswith(text) for message in messages] == [True] * (hvd.rank() == 0)


@everywhere
def test_a_step_waits_only_for_the_copy_and_the_file_holds_the_copied_values(tmp_path: Path) -> None:
    go, weight = threading.Event(), torch.ones(3)

    def wait(number: int, name: str) -> None:
        assert go.wait(20)

    with CheckpointManager(folder(tmp_path), {"weight": weight}, every_steps=1, asynchronous=True) as manager:
        with CountingFileSystem(wait).in_use():
            manager.step()
            if hvd.rank() == 0:
                assert not (tmp_path / "step-000000001.pt").exists()
            weight.fill_(2)
            go.set()
            manager.wait()
        assert load(folder(tmp_path) / "step-000000001.pt")["weight"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@everywhere
def test_a_signal_to_one_rank_saves_and_ends_all_after_the_same_step(number: signal.Signals, tmp_path: Path) -> None:
    state: dict[str, Any] = {"value": 0}
    handler = signal.getsignal(number)
    manager = CheckpointManager(folder(tmp_path), state, asynchronous=True, exit_code=99)
    manager.step()
    if hvd.rank() == hvd.size() - 1:
        os.kill(os.getpid(), number)
    state["value"] = 2
    with warned() as messages, pytest.raises(Preempted) as caught:
        manager.step()
    text = f"Signal {int(number)} ({signal.strsignal(number)}) ended the run after step 2, which is saved."
    assert [message.startswith(text) for message in messages] == [True] * (hvd.rank() == 0)
    assert (caught.value.code, caught.value.number, manager.steps) == (99, number, 2)
    manager.close()
    assert signal.getsignal(number) is handler
    assert load(folder(tmp_path) / "step-000000002.pt")["value"] == 2


@everywhere
def test_a_manager_leaves_handlers_alone_that_came_after_its_own(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    first, second = (CheckpointManager(folder(tmp_path) / name, {}) for name in ("first", "second"))
    first.close()
    if hvd.rank() == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
    with warned(), pytest.raises(Preempted):
        second.step()
    second.close()
    assert signal.getsignal(signal.SIGUSR1) is before
    third = CheckpointManager(folder(tmp_path) / "third", {})
    of_script = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    third.close()
    assert signal.signal(signal.SIGUSR1, before) is signal.SIG_IGN and of_script is not before


def start_and_end_children() -> None:
    for _ in range(20):
        child = FORK.Process(target=signal.pause)
        child.start()
        child.terminate()  # often before the child has run
        child.join(SECONDS)
        assert child.exitcode == -signal.SIGTERM


@pytest.mark.only_ci(where=lambda world: world != "local-1")
@everywhere
def test_forked_processes_end_by_a_signal_while_a_manager_is_open(tmp_path: Path) -> None:
    previous = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with CheckpointManager(folder(tmp_path), {}) as manager:
            if hvd.rank() == 0:
                start_and_end_children()
                with FORK.Pool(2) as pool:
                    assert pool.map(signal.getsignal, [signal.SIGTERM, signal.SIGUSR1]) == [
                        signal.SIG_DFL,
                        signal.SIG_IGN,
                    ]
            assert manager.step() is False  # no signal of a child has reached the manager
    finally:
        signal.signal(signal.SIGUSR1, previous)


class IteratingLoader(DataLoader[Any]):
    """Starts its iterator by itself, as torchdata's StatefulDataLoader."""

    def __iter__(self) -> Any:
        return self._get_iterator()


def signal_all(processes: list[Any], *numbers: signal.Signals) -> None:
    for number in numbers:
        for process in processes:
            os.kill(process.pid, number)


@everywhere
def test_workers_outlive_signals_until_they_are_terminated_or_the_manager_is_closed(tmp_path: Path) -> None:
    check_workers("fork", tmp_path)


@pytest.mark.only_ci
@pytest.mark.ranks(1)  # seconds each, for the import of torch; other ranks make no difference
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@everywhere
def test_workers_that_are_new_interpreters_outlive_signals_too(method: str, tmp_path: Path) -> None:
    check_workers(method, tmp_path)


def check_workers(method: str, tmp_path: Path) -> None:
    data: Any = range(100)
    loader = IteratingLoader(data, num_workers=1, multiprocessing_context=method, persistent_workers=True)
    executor = ProcessPoolExecutor(1, multiprocessing.get_context(method))
    with CheckpointManager(folder(tmp_path), {}) as manager:
        assert executor.submit(abs, -1).result(SECONDS) == 1
        (of_executor,) = multiprocessing.active_children()
        batches = iter(loader)
        other = FORK.Process(target=signal.pause, daemon=True)
        other.start()
        workers = [child for child in multiprocessing.active_children() if child not in (other, of_executor)]
        signal_all([*workers, other, of_executor], signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM)
        assert [batch.item() for batch in batches] == list(range(100))
        assert executor.submit(abs, -2).result(SECONDS) == 2
        assert other.is_alive() and manager.step() is False
        other.terminate()
        other.join(SECONDS)
        assert other.exitcode == -signal.SIGTERM
    executor.shutdown()
    for worker in workers:
        worker.terminate()
        worker.join(SECONDS)
        assert worker.exitcode == 0


@everywhere
def test_workers_that_are_older_than_the_manager_are_named_when_the_signal_ends_them(tmp_path: Path) -> None:
    older = FORK.Process(target=signal.pause, name="Older", daemon=True)
    older.start()
    with warned() as messages, pytest.raises(ZeroDivisionError), CheckpointManager(folder(tmp_path), {}):
        signal_all([older], signal.SIGTERM)
        older.join(SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        raise ZeroDivisionError
    assert "Older started before the manager was made" in messages[0]
    with warned() as messages, pytest.raises(ZeroDivisionError), CheckpointManager(folder(tmp_path), {}):
        os.kill(os.getpid(), signal.SIGTERM)
        raise ZeroDivisionError
    assert messages[0].endswith("so its last steps are not saved.")


@everywhere
def test_a_relative_folder_stays_the_same_when_the_program_changes_its_own(tmp_path: Path) -> None:
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        with CheckpointManager("saved", {"value": 3}, every_steps=1) as manager:
            os.chdir("/")
            manager.step()
            assert manager.restore_latest() is not None
    finally:
        os.chdir(before)
    assert load(tmp_path / "saved" / "step-000000001.pt")["value"] == 3


@everywhere
def test_the_clock_of_rank_0_decides_when_seconds_have_passed(tmp_path: Path) -> None:
    manager = CheckpointManager(folder(tmp_path), {}, every_seconds=1e9)
    manager._saved_at -= 2e9 if hvd.rank() == 0 else 0
    assert manager.step() is True
    assert manager.step() is False
    manager.close()


@everywhere
def test_ranks_ask_each_other_for_news_in_every_so_many_steps_only(tmp_path: Path) -> None:
    manager = CheckpointManager(folder(tmp_path), {}, every_seconds=1e9, agree_every=3)
    manager._saved_at -= 2e9 if hvd.rank() == 0 else 0
    assert [manager.step() for _ in range(6)] == [False, False, True, False, False, False]
    manager.close()


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return what torch.compile does, whose import takes seconds: a module with this attribute."""
    made = torch.nn.Module()
    made._orig_mod = model
    return made


TorchDataParallel = torch.nn.DataParallel
Averaged = torch.optim.swa_utils.AveragedModel


def wrapped(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return `model` in wrappers, and models of which it is a part in wrappers."""
    parts: list[Any] = [TorchDataParallel, Averaged, compiled, hvd.DistributedDataParallel]
    parts += [lambda part: Averaged(compiled(part)), lambda part: compiled(TorchDataParallel(Averaged(part)))]
    nested = [torch.nn.Sequential(wrap(model[0])) for wrap in parts]  # type: ignore[index]
    return [model, *nested, *(wrap(model) for wrap in parts), Averaged(nested[1]), compiled(nested[3])]


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@everywhere
def test_exported_weights_load_without_dualdist(suffix: str, tmp_path: Path) -> None:
    path, model = folder(tmp_path) / f"a.{suffix}", torch.nn.Sequential(torch.nn.Linear(2, 2))
    if suffix == "safetensors" and importlib.util.find_spec("safetensors") is None:
        with pytest.raises(hvd.CheckpointError, match="Run pip install safetensors"):
            hvd.checkpoint.export_weights(path, model)
        return
    for source in wrapped(model):
        hvd.checkpoint.export_weights(path, source)
        if hvd.rank() == 0:
            found = read_exported(path)
            assert list(found) == ["0.weight", "0.bias"]
            assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    with pytest.raises(hvd.CheckpointError, match="`path` must be where a file can be written"):
        hvd.checkpoint.export_weights("/dev/null/not-here.pt", model)


def read_exported(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".pt":
        weights: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
        return weights
    from safetensors.torch import load_file

    return dict(sorted(load_file(path).items(), reverse=True))


if __name__ == "__main__":
    from tests.behaviours import test_checkpoint  # the ranks import it by this name

    for name, (world_name, style) in SAVERS.items():
        with started(*WORLDS[world_name]) as world:
            RECORDED.mkdir(exist_ok=True)
            world.run(test_checkpoint.record, RECORDED / f"{name}.pt", style)
