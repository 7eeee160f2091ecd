"""Objects that some ranks cannot unpickle: an error on these ranks, and the next call works."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd
from dualdist.elastic import TorchState

from ..helpers.faulty_file_system import CountingFileSystem
from ..helpers.ranks import check_next_calls_work
from ..helpers.world import everywhere

pytestmark = pytest.mark.ranks(2, 3)


class Unfriendly(Exception):
    """An exception that shows nothing and cannot be copied."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__()

    def __str__(self) -> str:
        raise MemoryError

    def __reduce__(self) -> Any:
        raise MemoryError


ERRORS: dict[str, Callable[[], BaseException]] = {
    "module missing": lambda: ModuleNotFoundError("No module named 'elsewhere'"),
    "value": lambda: ValueError("an old version"),
    "error of dualdist": lambda: hvd.HorovodInternalError("of the object"),
    "error without text": lambda: Unfriendly(1, 2),
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
}


def load(kind: str, ranks: list[int]) -> str:
    """Return what an Unloadable becomes. Raises on `ranks`."""
    if hvd.rank() in ranks:
        raise ERRORS[kind]()
    return "loaded"


class Unloadable:
    """An object that cannot be unpickled on `ranks`."""

    def __init__(self, kind: str, ranks: list[int]) -> None:
        self.arguments = kind, ranks

    def __reduce__(self) -> Any:
        return load, self.arguments

    def __deepcopy__(self, memo: Any) -> Unloadable:
        return self


def last() -> int:
    return hvd.size() - 1


def refused(kind: str, on: int) -> Any:
    """Return a context that expects the object's error on rank `on`, and nothing on the others."""
    return pytest.raises(type(ERRORS[kind]())) if hvd.rank() == on else contextlib.nullcontext()


CALLS: dict[str, Callable[[Unloadable], object]] = {
    "broadcast_object": hvd.broadcast_object,
    "allgather_object": hvd.allgather_object,
    "gather_object": lambda obj: hvd.gather_object(obj, last()),
    "scatter_object": lambda obj: hvd.scatter_object([obj] * hvd.size() if hvd.rank() == 0 else None),
}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("call", CALLS)
@everywhere
def test_the_error_is_raised_on_the_rank_that_cannot_unpickle(call: str, kind: str) -> None:
    for _ in range(2):
        with refused(kind, on=last()):
            CALLS[call](Unloadable(kind, [last()]))
        check_next_calls_work()


@everywhere
def test_the_error_names_the_rank_of_the_object() -> None:
    obj = Unloadable("value", [0]) if hvd.rank() == last() else "fine"
    with refused("value", on=0) as caught:
        hvd.allgather_object(obj)
    if caught is not None and hasattr(caught.value, "add_note"):  # Python 3.11
        assert caught.value.__notes__ == [f"The object of rank {last()} could not be unpickled on this rank."]


@everywhere
def test_other_ranks_get_the_object() -> None:
    with refused("value", on=last()):
        assert hvd.allgather_object(Unloadable("value", [last()])) == ["loaded"] * hvd.size()


@everywhere
def test_an_object_that_cannot_be_pickled_and_shows_nothing_fails_everywhere() -> None:
    def pickled_badly() -> Any:
        raise Unfriendly(1, 2)

    class Bad:
        def __reduce__(self) -> Any:
            return pickled_badly()

    with pytest.raises(Unfriendly if hvd.rank() == last() else hvd.HorovodInternalError):
        hvd.allgather_object(Bad() if hvd.rank() == last() else None)
    check_next_calls_work()


class Stateful:
    """An object of an elastic state."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state["held"]


@pytest.mark.parametrize("stateful", [False, True])
@everywhere
def test_an_elastic_state_is_shared_by_all_or_by_none(stateful: bool) -> None:
    obj = Unloadable("value", [last()])
    state = TorchState(value=Stateful(obj) if stateful else obj)
    error = ValueError if hvd.rank() == last() else RuntimeError
    with pytest.raises(error, match=f"old version|Rank {last()} failed: ValueError: an old version") as caught:
        state.sync()
    assert not isinstance(caught.value, hvd.HorovodInternalError)  # elastic training would start again
    check_next_calls_work()


@everywhere
def test_optimizer_state_and_extra_state_of_a_model_are_sent_to_all_or_to_none() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer.param_groups[0]["mark"] = Unloadable("value", [last()])
    state = {"weight": torch.ones(1), "_extra_state": Unloadable("value", [last()])}
    error = ValueError if hvd.rank() == last() else RuntimeError
    with pytest.raises(error, match="an old version"):
        hvd.broadcast_optimizer_state(optimizer, 0)
    with pytest.raises(error, match="an old version"):
        hvd.broadcast_parameters(state, 0)
    check_next_calls_work()


class StrangeError(hvd.CheckpointError):
    """An error that only rank 0 can make."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def raise_at_sync(number: int, name: str) -> None:
    if name == "sync":
        raise StrangeError(1, 2)


@everywhere
def test_every_rank_gets_an_error_of_the_file_system_that_cannot_be_sent(tmp_path: Path) -> None:
    disk = CountingFileSystem(raise_at_sync)
    with disk.in_use(), pytest.raises(hvd.CheckpointError, match="1 and 2"):
        hvd.checkpoint.save(tmp_path / "file", {"step": 1})
    check_next_calls_work()
