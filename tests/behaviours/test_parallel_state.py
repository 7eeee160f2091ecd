"""The state of a wrapped module: names, files, copies, and the tools of torch that read them."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.reference_training import make_model
from ..helpers.world import everywhere


def zeroed(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    return module


def same(left: Any, right: Any) -> bool:
    """Return whether two state dicts have the same names and values."""
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.world_kinds("torch-gloo")
@everywhere
def test_distributed_checkpoints_that_are_saved_meanwhile_load_into_the_bare_model(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    path = hvd.broadcast_object(str(tmp_path), 0)
    wrapped = hvd.DistributedDataParallel(nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)))
    expected = copy.deepcopy(dict(get_model_state_dict(wrapped)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its storage
        future: Any = dcp.async_save({"model": get_model_state_dict(wrapped)}, checkpoint_id=path)
        future.result()
        zeroed(wrapped)
        bare = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
        dcp.load({"model": bare.state_dict()}, checkpoint_id=path)
        assert same(bare.state_dict(), expected)
        dcp.load({"model": get_model_state_dict(wrapped)}, checkpoint_id=path)
        assert same(wrapped.module.state_dict(), expected)


def pickled(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


@everywhere
def test_names_in_the_state_are_those_of_the_module_tree() -> None:
    wrapped: Any = hvd.DistributedDataParallel(make_model())
    state = wrapped.state_dict()
    assert list(state) == [name for name, _ in wrapped.named_parameters()]
    assert list(state) == [f"module.{name}" for name in wrapped.module.state_dict()]
    for name in wrapped.module.state_dict():
        assert name in state
        assert state[name] is state[f"module.{name}"] is state.get(name)
    assert "other" not in state and state.get("other") is None
    with pytest.raises(KeyError):
        state["other"]


@everywhere
def test_a_shallow_copy_of_the_state_has_the_names_of_the_state() -> None:
    wrapped: Any = hvd.DistributedDataParallel(make_model())
    state = wrapped.state_dict()
    for copied in (copy.copy(state), state.copy(), state | {}):
        assert list(copied) == list(state)
        assert all(copied[name] is value for name, value in state.items())
        assert list(through_a_file(copied)) == list(wrapped.module.state_dict())


@everywhere
def test_files_have_bare_names_and_load_with_and_without_the_wrapper() -> None:
    wrapped: Any = hvd.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    saved = through_a_file(wrapped.state_dict())
    expected = copy.deepcopy(wrapped.module.state_dict())
    assert type(saved) is type(expected) and same(saved, expected)
    assert saved._metadata == expected._metadata
    bare: Any = zeroed(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    bare.load_state_dict(saved)
    assert same(bare.state_dict(), expected)
    for state in (saved, wrapped.state_dict(), copy.deepcopy(wrapped.state_dict())):
        taken = copy.deepcopy(state)
        zeroed(wrapped)
        wrapped.load_state_dict(taken)
        assert same(wrapped.module.state_dict(), expected)
    with pytest.raises(RuntimeError, match="Missing key"):
        wrapped.load_state_dict({"other": torch.ones(1)})


@everywhere
def test_a_wrapper_inside_another_module_loads_both_names() -> None:
    names = list(make_model().state_dict())
    outer = nn.ModuleDict({"part": hvd.DistributedDataParallel(make_model())})
    assert list(outer.state_dict()) == [f"part.module.{name}" for name in names]
    state = copy.deepcopy(outer.state_dict())
    for prefix in ("part.", "part.module."):
        zeroed(outer)
        outer.load_state_dict({prefix + name: state[f"part.module.{name}"] for name in names})
        assert same(outer.state_dict(), state)


@everywhere
def test_checkpoints_have_bare_names_wherever_the_wrapper_is(tmp_path: Path) -> None:
    path = (tmp_path if hvd.rank() == 0 else Path("/dev/null/not-here")) / "a.pt"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    outer = nn.ModuleDict({"part": hvd.DistributedDataParallel(model), "other": nn.Linear(1, 1)})
    hvd.checkpoint.save(path, {"model": outer})
    bare = nn.ModuleDict({"part": nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), "other": nn.Linear(1, 1)})
    saved = hvd.checkpoint.load(path, {"model": zeroed(bare)})["model"]
    assert list(saved) == list(bare.state_dict())
    assert saved._metadata == bare.state_dict()._metadata  # type: ignore[attr-defined]
    assert same(bare["part"].state_dict(), model.state_dict())
    expected = copy.deepcopy(outer.state_dict())
    zeroed(outer)
    hvd.checkpoint.load(path, {"model": outer})
    assert same(outer.state_dict(), expected)


@everywhere
def test_a_part_that_is_called_module_keeps_its_name() -> None:
    model = nn.ModuleDict({"module": nn.Linear(1, 1)})
    wrapped: Any = hvd.DistributedDataParallel(model)
    saved = through_a_file(wrapped.state_dict())
    assert list(saved) == ["module.weight", "module.bias"]
    for state in (saved, wrapped.state_dict()):
        taken = copy.deepcopy(state)
        zeroed(wrapped)
        wrapped.load_state_dict(taken)
        assert same(model.state_dict(), saved)


@everywhere
def test_functional_call_takes_the_state() -> None:
    wrapped: Any = hvd.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    before = wrapped.module.weight.item()
    for name in ("module.weight", *wrapped.state_dict()):
        state: dict[str, Any] = {name: torch.full((1, 1), 3.0, requires_grad=True)}
        output = torch.func.functional_call(wrapped, state, torch.full((1, 1), 2.0))
        output.sum().backward()
        assert output.item() == 6.0
        assert state[name].grad.item() == 2.0
    assert torch.func.functional_call(wrapped, wrapped.state_dict(), torch.ones(1, 1)).item() == before
    wrapped(torch.full((1, 1), hvd.rank() + 1.0)).sum().backward()  # the parameters are in their places again
    assert wrapped.module.weight.grad.item() == (hvd.size() + 1) / 2


@everywhere
def test_distributed_checkpoints_of_torch_have_bare_names() -> None:
    from torch.distributed.checkpoint import state_dict as dcp

    wrapped: Any = hvd.DistributedDataParallel(nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5, momentum=0.9)
    wrapped(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    names = list(wrapped.module.state_dict())
    model_state, optimizer_state = dcp.get_state_dict(wrapped, optimizer)
    assert list(model_state) == names and list(optimizer_state["state"]) == names
    assert list(dcp.get_model_state_dict(wrapped)) == names
    expected = copy.deepcopy(dict(model_state))
    other = hvd.DistributedDataParallel(zeroed(nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))))
    fresh = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    dcp.set_state_dict(other, fresh, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert same(other.module.state_dict(), expected)
    assert fresh.param_groups[0]["lr"] == 0.5
    assert all(
        torch.equal(new["momentum_buffer"], old["momentum_buffer"])
        for new, old in zip(fresh.state.values(), optimizer.state.values(), strict=True)
    )


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@everywhere
def test_a_copy_joins_the_world_when_its_gradients_are_combined(copied: Any) -> None:
    wrapped: Any = hvd.DistributedDataParallel(nn.Linear(1, 1, bias=False), forward_sync_buffers=False)
    made = copied(wrapped)
    assert type(made) is type(wrapped) and not made.broadcast_buffers
    assert same(made.state_dict(), wrapped.state_dict())
    assert "in no world" in repr(made) and "in no world" not in repr(wrapped)
    if hvd.rank() == 0:  # local, until the first backward
        made(torch.ones(1, 1))
    made(torch.full((1, 1), hvd.rank() + 1.0)).sum().backward()
    assert made.module.weight.grad.item() == (hvd.size() + 1) / 2
    assert "in no world" not in repr(made)
    assert wrapped.module.weight.grad is None


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@everywhere
def test_the_forward_of_a_copy_with_buffers_is_local_until_its_gradients_are_combined(copied: Any) -> None:
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
    wrapped: Any = hvd.DistributedDataParallel(model)
    made = copied(wrapped)
    mean = made.module[0].running_mean
    if hvd.rank() == hvd.size() - 1:
        for _ in range(2):
            made(torch.tensor([[1.0], [3.0]]))
        assert mean.item() == pytest.approx(0.1 * 2 + 0.9 * 0.1 * 2)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    for _ in range(2):
        made(torch.full((2, 1), 1.0 + hvd.rank())).sum().backward()
    hvd.barrier()
    means = hvd.allgather(mean).tolist()
    # Before the second forward, the buffers became those of rank 0.
    start = 0.38 if hvd.size() == 1 else 0.0
    first = 0.9 * start + 0.1
    assert means == pytest.approx([0.9 * first + 0.1 * (1 + rank) for rank in range(hvd.size())])


@everywhere
def test_averages_of_a_wrapped_model_train_no_gradients() -> None:
    wrapped: Any = hvd.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    averaged = torch.optim.swa_utils.AveragedModel(wrapped)
    with torch.no_grad():
        wrapped.module.weight.fill_(2.0)
        averaged.update_parameters(wrapped)
        wrapped.module.weight.fill_(4.0)
        averaged.update_parameters(wrapped)
        assert averaged(torch.ones(1, 1)).item() == 3.0


@pytest.mark.ranks(3)
@everywhere
def test_a_wrapper_over_some_ranks_is_not_copied() -> None:
    pair = hvd.add_process_set([0, 1])
    wrapped: Any = hvd.DistributedDataParallel(nn.Linear(1, 1), process_group=pair)
    with pytest.raises(RuntimeError, match="must be the whole world to copy or pickle"):
        copy.deepcopy(wrapped)
    hvd.remove_process_set(pair)
