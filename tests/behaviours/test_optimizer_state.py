"""Optimizer state is equal on all ranks bit by bit, however it arrives: broadcast, elastic state or checkpoint."""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

import dualdist as hvd
from dualdist.checkpoint import load, save
from dualdist.core.training import optimizer_state, parameters
from dualdist.core.world import current
from dualdist.elastic import TorchState

from ..helpers.optimizers import DTYPES, KINDS, all_trained, difference, params_of, step, trained
from ..helpers.world import World, everywhere


def check(optimizer: torch.optim.Optimizer, expected: torch.optim.Optimizer, where: str) -> None:
    """Check that two optimizers are equal, and still are after another step from equal weights."""
    for _ in range(2):
        assert (problem := difference(optimizer.state_dict(), expected.state_dict(), where)) is None, problem
        for param, other in zip(params_of(optimizer), params_of(expected), strict=True):
            param.detach().copy_(other.detach())
        step(optimizer, 7)
        step(expected, 7)


@pytest.mark.parametrize(("steps", "others"), [(3, 0), (3, 2), (0, 2)])
@pytest.mark.parametrize("kind", KINDS)
@everywhere
def test_a_broadcast_keeps_dtypes_shapes_and_types(kind: str, steps: int, others: int) -> None:
    root = hvd.size() - 1
    for dtype in DTYPES:
        optimizer = trained(kind, dtype, hvd.rank(), steps if hvd.rank() == root else others)
        groups, state = list(optimizer.param_groups), optimizer.state
        weights, grads = copy.deepcopy(params_of(optimizer)), [param.grad for param in params_of(optimizer)]
        hvd.broadcast_optimizer_state(optimizer, root)
        assert all(param.grad is grad for param, grad in zip(params_of(optimizer), grads, strict=True))
        assert optimizer.state is state
        assert all(group is other for group, other in zip(optimizer.param_groups, groups, strict=True))
        assert difference(params_of(optimizer), weights) is None
        check(optimizer, trained(kind, dtype, root, steps), f"{kind} {dtype}")


@everywhere
def test_a_broadcast_gives_a_distributed_optimizer_the_state_of_the_root() -> None:
    plain = trained("SGD", torch.float32, hvd.rank(), 2)
    optimizer = hvd.DistributedOptimizer(plain)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=torch.nn.Linear(1, 1))
    expected = trained("SGD", torch.float32, 0, 2)
    assert difference(optimizer.state_dict(), expected.state_dict()) is None
    assert isinstance(optimizer, torch.optim.SGD) and hasattr(optimizer, "synchronize")


@everywhere
def test_a_broadcast_has_only_a_part_of_the_state_in_host_memory() -> None:
    """Copies that leave a device are counted."""
    made: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal most
        copy = tensor.clone()
        made.append(weakref.ref(copy))
        most = max(most, sum(other.nbytes for ref in made if (other := ref()) is not None))
        return copy

    optimizer = adam(hvd.rank() + 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameters, "_BATCH_BYTES", 800)
        patch.setattr(torch.Tensor, "cpu", copied)
        hvd.broadcast_optimizer_state(optimizer, 0)
    assert difference(optimizer.state_dict(), adam(1.0).state_dict()) is None
    assert most <= 1600  # those of the last part may not have been freed yet
    assert most >= 400 or hvd.rank() > 0


def adam(weight: float) -> torch.optim.Optimizer:
    """Return Adam with five parameters of 400 bytes, after a step with gradients of `weight`."""
    params = [torch.nn.Parameter(torch.zeros(100)) for _ in range(5)]
    for param in params:
        param.grad = torch.full_like(param, weight)
    optimizer = torch.optim.Adam(params)
    optimizer.step()
    return optimizer


@everywhere
def test_a_state_on_the_device_of_the_transport_is_sent_from_there() -> None:
    """The device is a double: the CPU. Only pickled objects, bytes, may be copied to the host."""
    to_host = torch.Tensor.cpu

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.dtype is torch.uint8
        return to_host(tensor)

    optimizer = adam(hvd.rank() + 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameters, "_BATCH_BYTES", 800)
        patch.setattr(torch.Tensor, "cpu", copied)
        patch.setattr(current().backend, "device", torch.device("cpu"))
        hvd.broadcast_optimizer_state(optimizer, 0)
    assert difference(optimizer.state_dict(), adam(1.0).state_dict()) is None


@pytest.mark.parametrize("is_root", [True, False])
@everywhere
def test_memory_that_runs_out_between_two_parts_is_an_error_on_every_rank(is_root: bool) -> None:
    last = hvd.size() - 1
    root = last if is_root else 0
    fails = is_root if hvd.size() == 1 else hvd.rank() == last
    calls, to_host, empty = itertools.count(), torch.Tensor.cpu, optimizer_state._empty

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if fails and tensor.dtype is not torch.uint8 and next(calls) == 3:
            raise MemoryError("no memory left")
        return to_host(tensor)

    def allocated(tensor: torch.Tensor, device: Any) -> torch.Tensor:
        if fails and device != "meta" and next(calls) == 3:
            raise MemoryError("no memory left")
        return empty(tensor, device)

    optimizer = adam(1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameters, "_BATCH_BYTES", 800)
        patch.setattr(torch.Tensor, "cpu", copied)
        patch.setattr(optimizer_state, "_empty", allocated)
        error = MemoryError if fails else hvd.HorovodInternalError
        with pytest.raises(error, match="no memory left") if fails or hvd.size() > 1 else contextlib.nullcontext():
            hvd.broadcast_optimizer_state(optimizer, root)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


class WithoutGroups(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {"step": 3}


@everywhere
def test_a_state_without_groups_is_an_error_on_every_rank() -> None:
    optimizer = WithoutGroups([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(
        (ValueError, hvd.HorovodInternalError), match=r"'param_groups' in its state_dict.*has \['step'\]"
    ):
        hvd.broadcast_optimizer_state(optimizer, 0)


@everywhere
def test_a_tensor_in_several_places_stays_one_tensor() -> None:
    optimizer = trained("Odd", torch.float32, hvd.rank(), 1)
    hvd.broadcast_optimizer_state(optimizer, 0)
    first, second = (optimizer.state[param]["shared"] for param in params_of(optimizer))
    assert first is second


@everywhere
def test_hooks_for_loading_see_and_change_the_state() -> None:
    optimizer, seen = trained("Adam", torch.bfloat16, hvd.rank(), 1), list[torch.Tensor]()

    def before(loading: Any, state: dict[str, Any]) -> dict[str, Any]:
        halved = {key: {**value, "exp_avg": value["exp_avg"] / 2} for key, value in state["state"].items()}
        return {**state, "state": halved}

    def after(loading: torch.optim.Optimizer) -> None:
        seen.extend(loading.state[param]["exp_avg"] for param in params_of(loading))

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
    hvd.broadcast_optimizer_state(optimizer, 0)
    roots = trained("Adam", torch.bfloat16, 0, 1)
    expected = [roots.state[param]["exp_avg"] / 2 for param in params_of(roots)]
    assert difference(seen, expected if hvd.rank() else []) is None
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == 1


@everywhere
def test_an_elastic_state_keeps_dtypes_shapes_and_types() -> None:
    optimizers: dict[str, Any] = dict(all_trained(hvd.rank(), 2))
    state: Any = TorchState(**optimizers)
    state.sync()
    for kind, dtype in [(kind, dtype) for kind in KINDS for dtype in DTYPES]:
        name = f"{kind} {dtype}"
        optimizer, expected = getattr(state, name), trained(kind, dtype, 0, 2)
        check(optimizer, expected, name)
        state._handlers[name].restore()
        check(optimizer, trained(kind, dtype, 0, 2), name)
    for name, optimizer in all_trained(hvd.rank(), 1).items():
        setattr(state, name, optimizer)
    state.commit()
    for name in optimizers:
        step(getattr(state, name), 5)
    state.restore()
    for name, expected in all_trained(hvd.rank(), 1).items():
        check(getattr(state, name), expected, name)


def portable() -> dict[str, torch.optim.Optimizer]:
    """Return optimizers whose state a checkpoint holds completely."""
    optimizers = all_trained(1, 2)
    for name, optimizer in optimizers.items():
        for state in optimizer.state.values() if name.startswith("Odd") else ():
            del state["pair"], state["recent"], state["marked"]
            state["master"] = state["master"].detach()
            state["trained"] = state["trained"].detach()
            state["expanded"] = state["expanded"].clone()
    return optimizers


def saved(path: Path) -> None:
    save(path if hvd.rank() == 0 else "/dev/null/not-here", portable())


def check_loaded(path: Path) -> None:
    state = all_trained(hvd.rank(), 1)
    load(path if hvd.rank() == 0 else "/dev/null/not-here", state)
    for name, expected in portable().items():
        check(state[name], expected, name)


def alone(function: Callable[[Path], None], path: Path) -> None:
    """Call `function` in this process, a world of one."""
    hvd.init()
    try:
        function(path)
    finally:
        hvd.shutdown()


def test_a_checkpoint_gives_every_number_of_ranks_the_saved_dtypes(world: World, tmp_path: Path) -> None:
    alone(saved, tmp_path / "one.pt")
    world.run(saved, tmp_path / "many.pt")
    world.run(check_loaded, tmp_path / "one.pt")
    alone(check_loaded, tmp_path / "many.pt")


@everywhere
def test_a_checkpoint_that_does_not_load_leaves_the_state_with_its_dtypes(tmp_path: Path) -> None:
    class Failing:
        state: Mapping[str, Any] = MappingProxyType({"fails": False})

        def state_dict(self) -> dict[str, Any]:
            return dict(self.state)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if state["fails"]:
                raise ValueError("no")

    failing = Failing()
    failing.state = {"fails": True}
    path = tmp_path / "a.pt" if hvd.rank() == 0 else Path("/dev/null/not-here")
    optimizer = trained("Odd", torch.bfloat16, 0, 1)
    save(path, {"optimizer": portable()["Odd torch.bfloat16"], "other": failing})
    with pytest.raises(hvd.CheckpointError, match="could not load its state"):
        load(path, {"optimizer": optimizer, "other": Failing()})
    check(optimizer, trained("Odd", torch.bfloat16, 0, 1), "Odd")


@pytest.mark.parametrize("saved_first", [True, False])
@everywhere
def test_a_checkpoint_of_another_precision_loads_with_the_precision_of_the_model(
    saved_first: bool, tmp_path: Path
) -> None:
    def made(dtype: torch.dtype) -> dict[str, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1).to(dtype)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2, dtype=dtype)).sum().backward()
        optimizer.step()
        pair = {"model": model, "optimizer": optimizer}
        return pair if saved_first else dict(reversed(pair.items()))

    path = tmp_path / "a.pt" if hvd.rank() == 0 else Path("/dev/null/not-here")
    save(path, made(torch.bfloat16))
    state = made(torch.float32)
    load(path, state)
    kept = [entry["exp_avg"].dtype for entry in state["optimizer"].state.values()]
    assert kept == [torch.float32] * 2
    state["optimizer"].step()
