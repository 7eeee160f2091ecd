"""Checkpoints of models that torch has sharded: what is saved and kept, how a run resumes, and what is refused."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.util
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map

import dualdist as hvd
from dualdist.checkpoint import CheckpointManager
from dualdist.sharding.checkpoints import FolderCatalog

from ..helpers.collected_warnings import warned
from ..helpers.sharded_training import adamw, shard, train, transformer, weights, whole
from ..helpers.world import everywhere
from .test_checkpoint_failures import damage

fsdp = pytest.importorskip("torch.distributed.fsdp._fully_shard", reason="FSDP2 is public from torch 2.6 on")
fully_shard = fsdp.fully_shard

SAVED, MORE = 2, 2
"""Steps before and after a save."""


def later_with_horovod(function: Callable[..., None]) -> Callable[..., None]:
    """Make a test for `everywhere` whose worlds of Horovod are in CI alone."""
    test: Callable[..., None] = pytest.mark.only_ci(where=lambda world: "horovod" in world)(everywhere(function))
    return test


def sharded_run(seed: int = 0) -> dict[str, Any]:
    """Return the state of a run with a sharded model and some more."""
    model = transformer()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(seed)
    shard(model, hvd.device_mesh())
    optimizer = adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": seed}


def step(state: dict[str, Any], manager: CheckpointManager, steps: int) -> None:
    """Train up to `steps`, every rank on the whole batches."""
    for number in range(manager.steps, steps):
        train(state["model"], state["optimizer"], steps=number + 1, first=number)
        state["scheduler"].step()
        state["epoch"] = number + 1
        manager.step()


def managed(folder: Path, state: dict[str, Any], **options: Any) -> CheckpointManager:
    return CheckpointManager(folder, state, **{"every_steps": 1, "sharded": True, "signals": (), **options})


def names_in(folder: Path) -> list[str]:
    """Return the names in `folder` but that of the note of the job."""
    return sorted({path.name for path in folder.iterdir()} - {".dualdist-owner"})


@contextlib.contextmanager
def small_files(is_on: bool) -> Iterator[None]:
    """Let no file of this process be longer than 200,000 bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_on:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("asynchronous", [False, True])
@everywhere
def test_a_resumed_run_is_equal_to_the_last_bit(asynchronous: bool, tmp_path: Path) -> None:
    undisturbed, resumed = sharded_run(), sharded_run(seed=1)
    with managed(tmp_path, undisturbed, every_steps=SAVED, asynchronous=asynchronous) as manager:
        assert manager.restore_latest() is None
        step(undisturbed, manager, SAVED)
        random = hvd.allgather_object(float(torch.rand(1)))
        manager.wait()
        with managed(tmp_path, resumed, every_steps=None, asynchronous=asynchronous) as other:
            manifest = other.restore_latest()
            assert manifest is not None and manifest.step == SAVED == other.steps == resumed["epoch"]
            assert hvd.allgather_object(float(torch.rand(1))) == random
            step(resumed, other, SAVED + MORE)
        step(undisturbed, manager, SAVED + MORE)
    assert weights(resumed["model"]) == weights(undisturbed["model"])
    assert resumed["scheduler"].state_dict() == undisturbed["scheduler"].state_dict()


class Counting(torch.optim.Optimizer):
    """Counts in its groups and in an attribute, draws random numbers, and has tensors in containers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"count": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        self.calls += 1
        group = self.param_groups[0]
        group["count"] += 1
        group["twice"] = 2 * group["count"]
        state_of: dict[Any, Any] = self.state
        state_of["all"] = torch.full((2,), float(self.calls))
        for param in group["params"]:
            if param.grad is not None:
                state = state_of[param]
                state.setdefault("sums", (torch.zeros_like(param), {1: torch.zeros(3)}))[0].add_(param.grad)
                state["sums"][1][1].add_(1)
                state["norm"] = param.grad.norm() + state.get("norm", 0)
                factor = torch.rand(1).item() * group["twice"] * self.calls * float(state["sums"][1][1].sum())
                param.sub_(0.001 * factor * (state["sums"][0] + 1).sign())

    def state_dict(self) -> Any:
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.calls = state_dict["calls"]


class Halves(nn.Module):
    """A layer, and a head that is used when `with_head` is set."""

    def __init__(self, way: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.with_head = nn.Linear(4, 6), nn.Linear(6, 6), False
        with torch.no_grad():
            self.layer.weight.add_(seed)
        if way == "tensor parallel":
            parallelize_module(self, hvd.device_mesh(), {"layer": ColwiseParallel(), "head": RowwiseParallel()})
        else:
            fully_shard(self, mesh=hvd.device_mesh())

    def forward(self, rows: torch.Tensor) -> Any:
        inner = self.layer(rows).tanh()
        return self.head(inner) if self.with_head else inner


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1), weight_decay=0.1, foreach=False),
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "LBFGS": lambda params: torch.optim.LBFGS(params, max_iter=3),
    **{
        name: getattr(torch.optim, name)
        for name in ("NAdam", "RAdam", "ASGD", "Rprop", "Adagrad", "Adadelta", "Adamax")
    },
    "Counting": Counting,
}
OF_EACH_FORM = ("SGD", "Adam", "LBFGS", "Counting")
"""Optimizers with every form of state: none, tensors, numbers, one for all parameters, containers."""


def contents(state: dict[str, Any]) -> Any:
    """Return all that models and optimizers have, as plain values."""
    return {
        name: tree_map(
            lambda value: (value.dtype, whole(value).tolist()) if isinstance(value, torch.Tensor) else value,
            dict(value.state_dict()),
        )
        for name, value in state.items()
    }


@pytest.mark.only_ci(where=lambda world, steps: world == "local-1" or steps == 0)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("way", ["fully sharded", "tensor parallel"])
@later_with_horovod
def test_a_save_takes_no_step_of_any_optimizer(way: str, steps: int, tmp_path: Path) -> None:
    """Some parameters are first used after the resume."""
    names = tuple(OPTIMIZERS) if way == "fully sharded" else OF_EACH_FORM

    def closure(model: Any, optimizer: Any, rows: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            optimizer.zero_grad()
            loss: torch.Tensor = model(rows).square().mean()
            loss.backward()
        return loss

    def advance(model: Any, optimizer: Any, first: int, last: int) -> None:
        for number in range(first, last):
            torch.manual_seed(number)
            optimizer.step(functools.partial(closure, model, optimizer, torch.rand(3, 4)))

    def made(seed: int) -> dict[str, Any]:
        models = {f"net of {name}": Halves(way, seed) for name in names}
        return models | {name: OPTIMIZERS[name](list(models[f"net of {name}"].parameters())) for name in names}

    def advance_all(state: dict[str, Any], first: int, last: int, with_head: bool) -> None:
        for name in names:
            state[f"net of {name}"].with_head = with_head or name == "LBFGS"  # which needs all gradients
            advance(state[f"net of {name}"], state[name], first, last)

    undisturbed, saved, resumed = states = made(0), made(0), made(1)
    for state in states[:2]:
        advance_all(state, 0, steps, with_head=False)
    with managed(tmp_path, saved) as manager:
        manager.save()
    assert contents(saved) == contents(undisturbed)
    with managed(tmp_path, resumed) as manager:
        manager.restore_latest()
    assert contents(resumed) == contents(undisturbed)
    for state in states:
        advance_all(state, steps, steps + 2, with_head=True)
    assert contents(undisturbed) == contents(saved) == contents(resumed)


@later_with_horovod
def test_what_a_checkpoint_has_no_state_for_gets_none(tmp_path: Path) -> None:
    small, large = (nn.Sequential(*[nn.Linear(2, 2) for _ in range(count)]) for count in (1, 2))
    optimizers = [torch.optim.NAdam(model.parameters()) for model in (small, large)]
    for model, optimizer in zip((small, large), optimizers, strict=True):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    with managed(tmp_path, {"net": small, "optimizer": optimizers[0]}) as manager:
        manager.save()
    with managed(tmp_path, {"net": large, "optimizer": optimizers[1]}) as manager, warned() as messages:
        manager.restore_latest(strict=False)
    assert "4 missing (net.1.bias" in messages[0]
    assert set(optimizers[1].state) == set(large[0].parameters())
    assert [float(state["step"]) for state in optimizers[1].state.values()] == [1, 1]


@later_with_horovod
def test_optimizer_state_keeps_its_dtypes(tmp_path: Path) -> None:
    def made(dtype: torch.dtype) -> dict[str, Any]:
        model = nn.Linear(4, 4).bfloat16()
        fully_shard(model, mesh=hvd.device_mesh())
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        for number, param in enumerate(model.parameters()):
            optimizer.state[param]["master"] = (param.detach().to(dtype) + number) / 3
        return {"net": model, "sgd": optimizer}

    for dtype in (torch.float32, torch.float64):
        saved, loaded = made(dtype), made(torch.bfloat16)
        with managed(tmp_path / str(dtype), saved) as manager:
            manager.save()
        with managed(tmp_path / str(dtype), loaded) as manager:
            manager.restore_latest()
        assert contents(loaded) == contents(saved)


@later_with_horovod
def test_an_archived_checkpoint_stays_whole_when_a_link_has_its_place(tmp_path: Path) -> None:
    state, placed = sharded_run(), tmp_path / "run" / "step-000000000"
    with managed(tmp_path / "run", state, keep=1, every_steps=None) as manager:
        manager.save()
        if hvd.rank() == 0:
            placed.rename(tmp_path / "archived")
            placed.symlink_to(tmp_path / "archived")
        manager.steps = 1
        manager.save()
        assert not placed.is_symlink()
        manager.restore(tmp_path / "archived")
        assert manager.steps == 0


def test_a_checkpoint_whose_removal_fails_half_way_has_lost_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "step-000000001"
    old.mkdir()
    monkeypatch.setattr("shutil.rmtree", lambda path: os.rmdir(f"{path}/no folder"))
    FolderCatalog(tmp_path, 1).remove(old)
    assert not old.exists()


@later_with_horovod
def test_a_closed_manager_leaves_no_group_of_torch(tmp_path: Path) -> None:
    groups = []
    for _ in range(2):
        with managed(tmp_path, sharded_run()) as manager:
            manager.save()
        groups.append(dist.distributed_c10d._world.pg_map.copy())
    assert len(groups[0]) == len(groups[1])
    manager.close()  # twice is once


@later_with_horovod
def test_torch_loads_the_folder(tmp_path: Path) -> None:
    state = sharded_run()
    with managed(tmp_path, state) as manager:
        step(state, manager, 1)
    found = {"model": transformer().state_dict()}
    dcp.load(found, checkpoint_id=tmp_path / "step-000000001")
    assert torch.cat([value.flatten() for value in found["model"].values()]).tolist() == weights(state["model"])


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Accelerate is not installed")
@later_with_horovod
def test_accelerate_merges_the_folder(tmp_path: Path) -> None:
    from accelerate.utils import merge_fsdp_weights

    state = sharded_run()
    with managed(tmp_path, state) as manager:
        step(state, manager, 1)
    expected = [whole(value) for value in state["model"].state_dict().values()]
    if hvd.rank() == 0:
        merge_fsdp_weights(str(tmp_path / "step-000000001"), str(tmp_path), safe_serialization=False)
        found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
        merged = [found[f"model.{name}"] for name in state["model"].state_dict()]
        assert all(torch.equal(one, other) for one, other in zip(merged, expected, strict=True))


@pytest.mark.parametrize("flat", [False, pytest.param(True, marks=pytest.mark.only_ci)])
@later_with_horovod
def test_a_folder_of_another_program_is_loaded(flat: bool, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    theirs, ours = sharded_run(), sharded_run(seed=1)
    theirs["optimizer"].param_groups[0]["lr"] *= 2
    train(theirs["model"], theirs["optimizer"], steps=1)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(theirs["model"], theirs["optimizer"], options=options)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "theirs")
    with managed(tmp_path / "ours", ours, every_steps=None) as manager:
        manager.steps = 3
        manager.save()
        manager.restore(tmp_path / "theirs")
        assert manager.steps == 3
        loaded = weights(ours["model"])
        manager.save()  # the weights are others than those saved for this step
        train(ours["model"], ours["optimizer"], steps=1)
        manager.restore_latest()
        assert weights(ours["model"]) == loaded
    for state in (theirs, ours):
        train(state["model"], state["optimizer"], steps=2, first=1)
    assert weights(ours["model"]) == weights(theirs["model"])


@pytest.mark.parametrize("program", ["ours", "theirs"])
@later_with_horovod
def test_hyperparameters_reach_their_group_when_parameters_have_numbers_for_names(program: str, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def made(*rates: Any) -> tuple[Any, Any]:
        model = torch.nn.ParameterList([torch.ones(2) for _ in range(3)])
        groups = [{"params": [model[index]], "lr": rate} for index, rate in zip((2, 0, 1), rates, strict=True)]
        return model, torch.optim.SGD(groups)

    (model, optimizer), (fresh, empty) = made(0.1, torch.tensor(0.2), 0.3), made(0.5, torch.tensor(0.6), 0.7)
    with managed(tmp_path / "ours", {"net": model, "sgd": optimizer}, every_steps=None) as manager:
        manager.save()
    net, sgd = get_state_dict(model, optimizer)
    dcp.save({"net": net, "sgd": sgd}, checkpoint_id=tmp_path / "theirs")
    with managed(tmp_path / "new", {"net": fresh, "sgd": empty}) as manager:
        manager.restore(tmp_path / ("ours/step-000000000" if program == "ours" else "theirs"))
    rates = [float(group["lr"]) for group in empty.param_groups]
    assert rates == [0.1, pytest.approx(0.2), 0.3]


@later_with_horovod
def test_hyperparameters_with_other_characters_in_their_names_are_loaded(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def made(rate: float) -> tuple[Any, Any]:
        model = torch.nn.Linear(2, 2)
        groups = [{"params": list(model.parameters()), "lr": rate, "no-decay": rate, "layer.name": rate}]
        return model, torch.optim.SGD(groups)

    (model, optimizer), (fresh, empty) = made(0.1), made(0.5)
    net, sgd = get_state_dict(model, optimizer)
    dcp.save({"net": net, "sgd": sgd}, checkpoint_id=tmp_path / "theirs")
    dcp.save({"net": net}, checkpoint_id=tmp_path / "weights")
    with managed(tmp_path / "new", {"net": fresh, "sgd": empty}) as manager:
        with pytest.raises(hvd.CheckpointError, match=r"missing \(sgd\.param_groups\.bias, "):
            manager.restore(tmp_path / "weights")
        manager.restore(tmp_path / "theirs")
    (group,) = empty.param_groups
    assert [group[name] for name in ("lr", "no-decay", "layer.name")] == [0.1] * 3


class Nested(torch.optim.SGD):
    """Has values in a container in its state."""

    def __init__(self, params: Any, contain: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(params, lr=0.1)
        self.contain = contain

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state.setdefault(param, {"kept": self.contain(param.detach())})
        return super().step(closure)


@later_with_horovod
def test_state_in_containers_is_saved_and_what_would_not_be_loaded_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = Nested(model.parameters(), lambda value: {"a": [value.clone(), None], 1: {"c.d": (value + 1, 2)}})
    optimizer.step()
    with managed(tmp_path / "dict", {"net": model, "sgd": optimizer}) as manager:
        manager.step()
        expected = (model.bias + 1).tolist()
        optimizer.state[model.bias]["kept"][1]["c.d"][0].zero_()
        assert manager.restore_latest() is not None
    kept = optimizer.state[model.bias]["kept"]
    (value, number), (_, nothing) = kept[1]["c.d"], kept["a"]
    assert (value.tolist(), number, nothing) == (expected, 2, None)
    optimizer = Nested(model.parameters(), lambda value: threading.Thread)
    optimizer.step()
    with managed(tmp_path / "class", {"net": model, "sgd": optimizer}, every_steps=None) as manager:
        with pytest.raises(hvd.CheckpointError, match=r"`sgd\.state\.\w+\.kept` must be a tensor, a number"):
            manager.save()


@later_with_horovod
def test_each_rank_may_have_other_layers(tmp_path: Path) -> None:
    def made() -> tuple[Any, Any]:
        model = torch.nn.ModuleDict({f"stage{hvd.rank()}": torch.nn.Linear(2, 2)})
        return model, torch.optim.SGD(model.parameters(), lr=0.1 * (1 + hvd.rank()), momentum=0.9)

    (model, optimizer), (fresh, empty) = made(), made()
    model[f"stage{hvd.rank()}"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for group in empty.param_groups:
        group["lr"] = 1
    with managed(tmp_path, {"net": model, "sgd": optimizer}) as manager:
        manager.step()
    with managed(tmp_path, {"net": fresh, "sgd": empty}) as manager:
        manager.restore_latest()
    assert empty.param_groups[0]["lr"] == 0.1 * (1 + hvd.rank())
    assert weights(fresh) == weights(model)
    momenta = [own.state[own.param_groups[0]["params"][0]]["momentum_buffer"] for own in (empty, optimizer)]
    assert torch.equal(*momenta)


@later_with_horovod
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with managed(tmp_path, sharded_run()) as manager:
        manager.save()
    others = {
        "of another shape": nn.Sequential(nn.Embedding(3, 8), *list(transformer())[1:]),
        "missing": transformer().append(nn.Linear(2, 2)),
        "unexpected": nn.Sequential(nn.Embedding(11, 8)),
    }
    for kind, other in others.items():
        other.double()
        before = torch.cat([param.detach().flatten() for param in other.parameters()]).tolist()
        shard(other, hvd.device_mesh())
        state: dict[str, Any] = {**sharded_run(1), "model": other, "optimizer": adamw(other.parameters())}
        with managed(tmp_path, state) as manager:
            with pytest.raises(hvd.CheckpointError, match=rf"step-000000000 must fit the state.* {kind} \(model"):
                manager.restore_latest()
            assert weights(other) == before and state["epoch"] == 1
            with warned() as messages:
                manager.restore_latest(strict=False)
            assert "does not fit completely" in messages[0]
            assert state["epoch"] == 0


@later_with_horovod
def test_the_model_alone_is_loaded_strictly(tmp_path: Path) -> None:
    saved, loaded = sharded_run(), sharded_run(seed=1)
    with managed(tmp_path, saved) as manager:
        step(saved, manager, 1)
    for extra, text in (([], ""), (["a"], "1 missing")):
        loaded["model"].extend(nn.Linear(1, 1, bias=False) for _ in extra)
        only = managed(tmp_path, {"model": loaded["model"]}, random_state=False)
        with only as manager:
            with pytest.raises(hvd.CheckpointError, match="unexpected"):
                manager.restore_latest()
            with pytest.raises(hvd.CheckpointError, match=text) if text else contextlib.nullcontext():
                manager.restore_latest(partial=True)
        assert weights(loaded["model"])[: len(weights(saved["model"]))] == weights(saved["model"])


@later_with_horovod
def test_a_hyperparameter_gets_the_kind_that_was_saved(tmp_path: Path) -> None:
    for rate, other in ((0.02, torch.tensor(0.01)), (torch.tensor(0.02), 0.01)):
        folder, saved, loaded = tmp_path / f"{type(rate).__name__}", sharded_run(), sharded_run(seed=1)
        saved["optimizer"].param_groups[0]["lr"] = rate
        loaded["optimizer"].param_groups[0]["lr"] = other
        with managed(folder, saved) as manager:
            manager.save()
        with managed(folder, loaded) as manager:
            manager.restore_latest()
        found = loaded["optimizer"].param_groups[0]["lr"]
        assert type(found) is type(rate)
        assert float(found) == pytest.approx(0.02)


@pytest.mark.only_ci
@later_with_horovod
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    state, newest, part = sharded_run(), tmp_path / "step-000000002", f"__{hvd.size() - 1}_0.distcp"
    with managed(tmp_path, state) as manager:
        step(state, manager, 2)
    for harm, name in ((os.unlink, part), (damage, part), (damage, ".metadata"), (damage, "dualdist.pt")):
        if hvd.rank() == 0:
            harm(newest / name)
        hvd.barrier()
        with managed(tmp_path, state) as manager:
            with pytest.raises(hvd.DamagedCheckpointError, match=name):
                manager.restore(newest)
            with warned() as messages:
                manifest = manager.restore_latest()
            assert hvd.rank() > 0 or name in messages[0]
            assert manifest is not None and manifest.step == 1 == state["epoch"]
            step(state, manager, 2)  # saved again, it is not damaged any more
            state["epoch"] = 5
            assert manager.restore_latest() is not None and state["epoch"] == 2


@pytest.mark.parametrize("asynchronous", [False, True])
@later_with_horovod
def test_a_full_disk_on_one_rank_is_an_error_on_all(asynchronous: bool, tmp_path: Path) -> None:
    state, last = sharded_run(), hvd.size() - 1
    state["large"] = nn.Linear(500, 500)  # the others fit
    fully_shard(state["large"], mesh=hvd.device_mesh())
    with managed(tmp_path, state, every_steps=None, asynchronous=asynchronous) as manager:
        manager.save()
        manager.wait()
        state["epoch"] = manager.steps = 1
        with (
            small_files(hvd.rank() == last),
            pytest.raises(
                hvd.CheckpointError,
                match=rf"of step 1 was not saved: Rank {last} failed.*File too large.*is that of step 0",
            ),
        ):
            manager.save()
            manager.wait()
        assert names_in(tmp_path) == ["step-000000000"]
        hvd.barrier()
        manager.save()
        manager.wait()
        manager.restore_latest()
        assert state["epoch"] == 1


@later_with_horovod
def test_a_folder_that_cannot_be_written_any_more_names_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *arguments: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with managed(tmp_path, sharded_run()) as manager:
        manager.save()
        manager.steps = 1
        text = r"of step 1 was not saved: .*Read-only.*is that of step 0, "
        with monkeypatch.context() as patch, pytest.raises(hvd.CheckpointError, match=text):
            patch.setattr(Path, "mkdir", refuse)
            manager.save()


@later_with_horovod
def test_a_step_that_is_saved_again_is_never_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, placed, rename = sharded_run(), tmp_path / "step-000000000", os.rename
    with managed(tmp_path, state) as manager:
        manager.save()
        failures = [OSError("Stale file handle")]

        def failing(source: Path, target: Path) -> None:
            if target == placed and failures:
                raise failures.pop()
            rename(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", failing)
            state["epoch"] = 1
            with pytest.raises(hvd.CheckpointError, match=r"not saved.*Stale.*complete checkpoint is that of"):
                manager.save({"loss": 1.0})
        assert names_in(tmp_path) == [placed.name]
        hvd.barrier()
        if hvd.rank() == 0:  # as a kill between the two renames
            rename(placed, tmp_path / f".{placed.name}.0123abcd.dualdist-tmp")
        hvd.barrier()
    with managed(tmp_path, state) as manager:
        assert manager.restore_latest() is not None and state["epoch"] == 0


@later_with_horovod
def test_what_one_rank_cannot_copy_is_an_error_on_all(tmp_path: Path) -> None:
    state, last = sharded_run(), hvd.size() - 1
    group = state["optimizer"].param_groups[0]
    with managed(tmp_path, state, every_steps=None, asynchronous=True) as manager:
        group["extra"] = threading.Lock() if hvd.rank() == last else None
        with pytest.raises(hvd.CheckpointError, match=rf"Rank {last} failed: .*lock"):
            manager.save()
        hvd.barrier()
        assert not names_in(tmp_path)
        group["extra"] = None
        hvd.barrier()
        manager.save()
        manager.wait()
        assert names_in(tmp_path) == ["step-000000000"]


@pytest.mark.ranks(2, 3)
@later_with_horovod
def test_a_folder_that_the_ranks_do_not_share_is_refused(tmp_path: Path) -> None:
    own = os.open(tmp_path, os.O_RDONLY) if hvd.rank() == 0 else None
    folder = hvd.broadcast_object(f"/proc/self/fd/{own}", 0)  # on rank 0 alone
    with managed(folder, sharded_run()) as manager:
        with pytest.raises(hvd.CheckpointError, match="must be on a file system that all ranks share, but rank 1"):
            manager.save()
    if own is not None:
        os.close(own)


@later_with_horovod
def test_sharded_models_need_a_manager_for_them(tmp_path: Path) -> None:
    state = sharded_run()
    with CheckpointManager(tmp_path, state, signals=()) as manager:
        with pytest.raises(hvd.CheckpointError, match=r"DTensor.*CheckpointManager\(sharded=True\)"):
            manager.save()
    with managed(tmp_path, {"optimizer": state["optimizer"]}) as manager:
        with pytest.raises(hvd.CheckpointError, match="must have the model of `optimizer`"):
            manager.save()
        hvd.barrier()
        assert not names_in(tmp_path)


@later_with_horovod
def test_names_that_make_equal_names_of_parts_are_refused(tmp_path: Path) -> None:
    state = {"net": transformer(), "net.ema": transformer(), "net.epoch": 0}
    with pytest.raises(ValueError, match=r"must not have the model or optimizer 'net.ema' beside 'net'"):
        managed(tmp_path, state)
    managed(tmp_path, {"net": state["net"], "net.epoch": 0}).close()


@pytest.mark.parametrize("sharded", [False, True])
@later_with_horovod
def test_checkpoints_of_the_other_kind_are_not_passed_over_silently(sharded: bool, tmp_path: Path) -> None:
    state = {"model": transformer(), "epoch": 0}
    with managed(tmp_path, state, sharded=not sharded) as manager:
        manager.save()
    with managed(tmp_path, state, sharded=sharded) as manager:
        with warned() as messages:
            assert manager.restore_latest() is None
        assert hvd.rank() > 0 or f"To load them, pass sharded={not sharded}" in messages[0]
