"""The content of a checkpoint: which values it can hold, and which of them fit when it is loaded."""

from __future__ import annotations

import contextlib
from collections import ChainMap, Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dualdist.checkpoint import Manifest, RandomState, contents, save_and_load
from dualdist.checkpoint.contents import HostCopy, check_state, collect, digest, fitting_part, on_host
from dualdist.checkpoint.format import MemoryFile, copy_verified, write_checkpoint
from dualdist.core import accelerator
from dualdist.devices import streams
from dualdist.errors import CheckpointError


def stored(value: Any, tmp_path: Path) -> Any:
    """Return `value` after writing it to a file and loading it."""
    portable = on_host({"value": value}, "state")
    write_checkpoint(tmp_path / "a.pt", portable, Manifest(1, 1, "", "", "", ""))
    with MemoryFile() as file:
        copy_verified(tmp_path / "a.pt", file.append)
        return file.load("a.pt")["value"]


def apply(state: dict[str, Any], values: dict[str, Any], *, strict: bool = True, rank: int = 0) -> None:
    """Load `values`, read from the file a.pt, into the `state` of one rank."""
    with (
        patch.object(save_and_load, "rank", lambda: rank),
        patch.object(save_and_load, "size", lambda: 1),
        patch.object(save_and_load, "if_all_succeed", lambda function, error: function()),
    ):
        save_and_load.load_into(state, values, strict=strict, origin="a.pt")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


VALUES: list[Any] = [
    *(None, True, 3, 2.5, 1j, float("inf"), "text", b"bytes"),
    *([1, [2]], (1, (2,)), {1, 2}, {"a": {"b": 1}, 2: 3, (1, 2): 4}, Counter("aab"), OrderedDict(b=1, a=2)),
    *(torch.float16, torch.Size([2, 3]), torch.device("cpu")),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_load_equal_and_with_the_same_type(value: Any, tmp_path: Path) -> None:
    assert check_state({"a": value}) == ["a"]
    found = stored(value, tmp_path)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.zeros(0, 4),
        torch.arange(6).view(2, 3).t(),
        torch.eye(3).to_sparse(),
        torch.arange(8, dtype=torch.bfloat16),
        torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last),
        nn.Parameter(torch.ones(2)),
        torch.tensor([1 + 2j]).conj(),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
@pytest.mark.parametrize("way", [on_host, HostCopy().take])
def test_tensors_load_equal(tensor: torch.Tensor, way: Any, tmp_path: Path) -> None:
    found = stored(way(tensor, "tensor"), tmp_path)
    assert (found.shape, found.dtype, found.layout) == (tensor.shape, tensor.dtype, tensor.layout)
    assert torch.equal(found.to_dense(), tensor.detach().to_dense())
    assert found.layout is not torch.strided or found.stride() == tensor.stride()


@pytest.mark.parametrize(
    "value",
    [object(), np.zeros(2), lambda: 0, nn.Linear(1, 1), {object(): 1}],
    ids=["object", "array", "function", "module", "key"],
)
def test_saving_refuses_a_value_that_could_not_be_loaded(value: Any) -> None:
    with pytest.raises(TypeError, match=r"`state\['a'\]\[1\]` must "):
        on_host({"a": [0, value]}, "state")


class Names(list[str]):
    """A list with additional methods, which would load as a plain list."""


@pytest.mark.parametrize(
    "value", [defaultdict(list), frozenset({1}), Names(), ChainMap({})], ids=lambda v: type(v).__name__
)
def test_a_container_that_would_load_as_another_type_is_refused(value: Any) -> None:
    message = rf"`state\['a'\]\[1\]\['b'\]` must be a container that loads as .* a {type(value).__name__} instead"
    with pytest.raises(TypeError, match=message):
        check_state({"a": [0, {"b": value}]})
    with pytest.raises(TypeError, match=r"`state\['a'\]` must be a container .* a frozenset instead"):
        check_state({"a": {frozenset({1})}})


def test_numpy_numbers_are_saved_as_plain_numbers(tmp_path: Path) -> None:
    assert stored([np.float64(0.5), np.int64(3)], tmp_path) == [0.5, 3]


@pytest.mark.parametrize("way", [on_host, HostCopy().take])
def test_one_tensor_under_two_names_is_saved_once(way: Any) -> None:
    weight = torch.ones(3)
    found = way({"a": weight, "b": weight, "c": weight[1:]}, "state")
    assert found["a"] is found["b"]
    assert torch.equal(found["c"], torch.ones(2))


def sparse_view(whole: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(whole.long()[None, :2], whole[5:7], (4,), check_invariants=True)


@pytest.mark.parametrize("view", [lambda whole: whole[5:7], sparse_view], ids=["dense", "sparse"])
def test_a_view_is_saved_without_the_rest_of_its_tensor(
    view: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    stored(view(torch.zeros(1 << 20)), tmp_path)
    assert (tmp_path / "a.pt").stat().st_size < 10_000


def test_a_host_copy_is_independent_of_the_state_and_reused() -> None:
    copy, live = HostCopy(), {"weight": torch.ones(3), "gone": torch.ones(2)}
    first = copy.take(live, "state")
    live["weight"].fill_(2)
    assert first["weight"].tolist() == [1, 1, 1]
    del live["gone"]
    second = copy.take(live, "state")
    assert second["weight"] is first["weight"]
    assert second["weight"].tolist() == [2, 2, 2]
    assert list(copy._held) == ["state['weight']"], "a tensor that is no longer saved must not be held"


def test_pinned_copies_of_a_state_take_little_more_than_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch takes a power of two for each piece of pinned memory. The CPU stands in for a device."""
    asked: list[int] = []

    def host_memory(length: int, *_: object) -> torch.Tensor:
        asked.append(length)
        return torch.empty(length, dtype=torch.uint8)

    monkeypatch.setattr(accelerator, "has_streams", lambda tensor: True)
    monkeypatch.setattr(streams, "host_memory", host_memory)
    monkeypatch.setattr(contents, "_LARGEST_CHUNK", 1 << 18)
    shapes = [(320, 40), *[(40, 40)] * 4, *[(110, 40)] * 3, (40,)] * 20  # as in a language model
    state = {str(place): torch.full(shape, float(place)).t() for place, shape in enumerate(shapes)}
    copy = HostCopy().take(state, "state")
    assert sum(1 << (length - 1).bit_length() for length in asked) < 1.2 * sum(one.nbytes for one in state.values())
    torch.save(copy, tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_size < 1.1 * sum(one.nbytes for one in state.values())
    for name, tensor in torch.load(tmp_path / "copy").items():
        assert torch.equal(tensor, state[name]) and tensor.stride() == state[name].stride()


def test_the_versions_of_submodules_are_kept(tmp_path: Path) -> None:
    found = stored(net().state_dict(), tmp_path)
    assert isinstance(found, OrderedDict)
    assert found._metadata["1"]["version"] == 2  # type: ignore[attr-defined]


def wrapped(model: nn.Module, names: str) -> nn.Module:
    """Return `model` inside modules that have it under these names, the first one outermost."""
    for name in reversed(names.split()):
        outer = nn.Module()
        outer.add_module(name, model)
        model = outer
    return model


# The names of torch's DistributedDataParallel, and of torch.compile, whose import takes seconds.
WRAPPERS = ("", "module", "_orig_mod", "_orig_mod module", "module _orig_mod")


@pytest.mark.parametrize("target", WRAPPERS)
@pytest.mark.parametrize("source", WRAPPERS)
def test_weights_load_with_and_without_wrappers(source: str, target: str) -> None:
    saved, model = wrapped(net(), source), net()
    apply({"model": wrapped(model, target)}, collect({"model": saved}, []))
    theirs = list(saved.state_dict().values())
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), theirs, strict=True))


def test_names_stay_when_removing_wrappers_would_make_them_equal() -> None:
    fitting, misfits = fitting_part({"a": torch.zeros(1)}, {"module.a": torch.ones(1), "_orig_mod.a": torch.ones(1)})
    assert not fitting
    assert misfits == ["1 missing (a)", "2 unexpected (module.a, _orig_mod.a)"]


def test_averaged_weights_are_restored() -> None:
    saved, fresh = AveragedModel(net()), AveragedModel(net())
    saved.update_parameters(net())
    apply({"ema": fresh}, collect({"ema": saved}, []))
    assert fresh.n_averaged == 1
    assert torch.equal(next(fresh.parameters()), next(saved.parameters()))


def test_a_strict_error_lists_all_mismatches_and_changes_nothing() -> None:
    model, optimizer = net(), torch.optim.SGD([torch.zeros(1)], 0.1)
    before = [value.clone() for value in model.state_dict().values()]
    larger = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    larger.add_module("more", nn.Linear(1, 1))
    two = torch.optim.SGD([torch.zeros(1), torch.ones(1)], 0.1)
    values = collect({"model": larger, "optimizer": two, "ema": {}}, [])
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    with pytest.raises(CheckpointError) as caught:
        apply(state, values)
    assert str(caught.value) == (
        "Checkpoint a.pt must fit the state, but does not: "
        "it has no `epoch`; it has `ema`, which the state does not have; "
        "`model` has 2 unexpected (more.weight, more.bias) and 7 of another shape (0.weight: (4, 2) instead of (3, 2), "
        "0.bias: (4,) instead of (3,), 1.weight: (4,) instead of (3,), and 4 more); "
        "`optimizer` has groups of [2] parameters instead of [1]. Pass partial=True to ignore names "
        "that only the file has, or strict=False to load what fits."
    )
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before, strict=True))


def test_without_strict_the_fitting_part_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    head = nn.Sequential(*[*net()][:2], nn.Linear(3, 5))
    model = net()
    state = {"model": model, "epoch": 3}
    apply(state, collect({"model": head, "step": 1}, []), strict=False)
    assert torch.equal(model.state_dict()["0.weight"], head.state_dict()["0.weight"])
    assert state["epoch"] == 3
    assert "2 of another shape (2.weight: (5, 3) instead of (1, 3), 2.bias" in caplog.text


def stepped(kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer of one parameter after one step."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = kind([parameter], lr=0.1, **options)  # type: ignore[call-arg]
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    return optimizer


SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


@pytest.mark.parametrize(
    ("own", "saved"), [(SGD, ADAM), (ADAM, SGD), (torch.optim.RMSprop, ADAM), (torch.optim.Rprop, SGD)]
)
def test_the_state_of_another_class_of_optimizer_does_not_fit(
    own: type[torch.optim.Optimizer], saved: type[torch.optim.Optimizer]
) -> None:
    optimizer = stepped(own)
    before = repr(optimizer.state_dict())
    text = f"`optimizer` has the state of another class of optimizer than {own.__name__}"
    with pytest.raises(CheckpointError, match=text):
        apply({"optimizer": optimizer}, collect({"optimizer": stepped(saved)}, []))
    assert repr(optimizer.state_dict()) == before


@pytest.mark.parametrize(("own", "saved"), [(SGD, SGD), (ADAM, ADAMW), (ADAMW, ADAM)])
def test_an_optimizer_state_loads_without_options_of_newer_versions(
    own: type[torch.optim.Optimizer], saved: type[torch.optim.Optimizer]
) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = own([parameter], lr=0.5)  # type: ignore[call-arg]
    values = collect({"optimizer": stepped(saved)}, [])
    for group in values["optimizer"]["param_groups"]:
        del group["fused"]
    apply({"optimizer": optimizer}, values)
    assert optimizer.param_groups[0]["lr"] == 0.1


class Picky:
    """Loads any value, and raises afterwards if it is not 1."""

    def __init__(self, value: int) -> None:
        self.value = [value]

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value[:] = state["value"]
        if self.value != [1]:
            raise ValueError("the reason")


class Unreadable(Picky):
    """Cannot return its state."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not now")


def test_an_object_without_a_readable_state_can_load_one() -> None:
    state = {"unreadable": Unreadable(0)}
    apply(state, {"unreadable": {"value": [1]}})
    assert state["unreadable"].value == [1]
    with pytest.raises(CheckpointError, match="the reason"):
        apply(state, {"unreadable": {"value": [2]}})


def draws() -> list[float]:
    import random

    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_memory_of_a_state_can_be_resized_after_it_was_used() -> None:
    state = tree_map(lambda value: value.clone() if torch.is_tensor(value) else value, RandomState().state_dict())
    RandomState().load_state_dict(state)
    RandomState().load_derived([state], 1)
    tensors = [value for value in tree_leaves(state) if torch.is_tensor(value)]
    assert len(tensors) == 2 and all(tensor.untyped_storage().resizable() for tensor in tensors)


def test_a_rank_without_a_saved_state_gets_its_own_repeatable_numbers() -> None:
    state = {"random": RandomState()}
    values = collect(state, [{"random": state["random"].state_dict()}])
    seen = []
    for rank in (0, 1, 2, 1, 2):
        apply(state, values, rank=rank)
        seen.append(draws())
    assert seen[1:3] == seen[3:]
    assert len({tuple(numbers) for numbers in seen[:3]}) == 3


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("own", [Picky(1), [1]], ids=["object", "value"])
def test_states_of_another_number_of_ranks_are_an_error(
    own: Any, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"data": own}
    saved = own.state_dict() if isinstance(own, Picky) else own
    with pytest.raises(CheckpointError) if strict else contextlib.nullcontext() as caught:
        apply(state, {"data": {"per_rank": [saved, saved]}}, strict=strict)
    text = caplog.text if caught is None else str(caught.value)
    assert "`data` has the states of 2 ranks in the file, not of 1" in text
    assert ("neither load_derived() nor per_rank = False" in text) == isinstance(own, Picky)
    assert state == {"data": own}


def test_an_object_that_says_so_after_the_save_gets_rank_0s_state_on_any_number_of_ranks() -> None:
    own: Any = Picky(1)
    own.per_rank = False
    with pytest.raises(CheckpointError, match="the reason"):
        apply({"data": own}, {"data": {"per_rank": [{"value": [2]}, {"value": [1]}]}}, rank=1)
    apply({"data": own}, {"data": {"per_rank": [{"value": [1]}, {"value": [2]}]}})
    assert own.value == [1]


def test_a_value_that_looks_like_the_states_of_all_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be a list under the key 'per_rank' alone"):
        check_state({"x": {"per_rank": [1]}})


EQUAL: list[tuple[Any, Any]] = [
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({"xy", "yz", "zx"}, {"zx", "yz", "xy"}),
    (["ab", "ab"], ["ab", "".join(["a", "b"])]),
    ((torch.ones(2),) * 2, (torch.ones(2), torch.ones(2))),
    (torch.eye(3)[1], torch.tensor([0.0, 1.0, 0.0])),
    (torch.arange(6).view(2, 3).t(), torch.tensor([[0, 3], [1, 4], [2, 5]])),
    (torch.eye(2).to_sparse(), torch.eye(2).to_sparse() * 0.5 + torch.eye(2).to_sparse() * 0.5),
    (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j])),
    (np.float64(0.5), 0.5),
    (float("nan"), -float("inf") + float("inf")),
]
DIFFERENT: list[tuple[Any, Any]] = [
    (1, 1.0),
    (True, 1),
    ([1, 2], (1, 2)),
    (["1"], [1]),
    (["a', 'b"], ["a", "b"]),
    (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
    ({"a": 1}, {"a": 2}),
    (torch.tensor([3, 0]), torch.tensor([0, 1])),
    (torch.zeros(2), torch.zeros(2, 1)),
    (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    (0.0, -0.0),
    (None, "None"),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_states_have_equal_digests(one: Any, other: Any) -> None:
    assert digest(one, "x") == digest(other, "x")


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_states_have_different_digests(one: Any, other: Any) -> None:
    assert digest({"x": [one]}, "x") != digest({"x": [other]}, "x")


def holding_itself(kind: type) -> Any:
    """Return a list or a dictionary in which it is itself, two levels deep."""
    held: Any = kind()
    inner = {"outer": held}
    held.append(inner) if kind is list else held.update(inner=inner)
    return held


@pytest.mark.parametrize("kind", [list, dict])
def test_a_state_that_holds_itself_is_refused(kind: type) -> None:
    state = {"x": holding_itself(kind)}
    with pytest.raises(TypeError, match=r"^`state\['x'\]` must not hold itself"):
        check_state(state)
    with pytest.raises(TypeError, match=r"^`state` must not hold itself"):
        on_host(state, "state")


class HostCopies(TorchDispatchMode):
    """Counts the bytes that are copied from host memory to host memory."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default) and result.is_cpu:
            self.num_bytes += result.nbytes
        return result


def test_a_rank_copies_only_the_optimizer_state_that_stays_on_the_cpu(tmp_path: Path) -> None:
    """The ranks of a host read the same pages. The device is "meta", whose tensors have no memory."""
    params = [nn.Parameter(torch.ones(length)) for length in (1000, 10)]
    for param in params:
        param.grad = torch.ones_like(param)
    trained = torch.optim.Adam(params)
    trained.step()
    saved = stored(trained.state_dict(), tmp_path)
    on_device, on_cpu = nn.Parameter(torch.ones(1000, device="meta")), nn.Parameter(torch.ones(10))
    optimizer = torch.optim.Adam([on_device, on_cpu])
    with HostCopies() as copies:  # type: ignore[no-untyped-call]
        apply({"optimizer": optimizer}, {"optimizer": saved})
    assert copies.num_bytes == 2 * 4 + 2 * 40  # two steps, and two averages
    assert optimizer.state[on_device]["exp_avg"].is_meta
    expected = trained.state[params[1]]["exp_avg"]
    saved["state"][1]["exp_avg"].zero_()
    assert torch.equal(optimizer.state[on_cpu]["exp_avg"], expected)
