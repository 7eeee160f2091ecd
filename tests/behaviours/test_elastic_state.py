"""Elastic states: what is saved, restored and shared, object by object."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dualdist as hvd
from dualdist.elastic import StateHandler, TorchState, run

from ..helpers.collected_warnings import warned
from ..helpers.elastic_training import BATCHES, RATE, handled, make_state, train_batch, weight
from ..helpers.world import everywhere


@everywhere
def test_objects_with_a_state_dict_keep_their_identity_and_return_to_the_commit() -> None:
    failures = iter([4])

    @run
    def train(state: Any) -> None:
        assert state.schedule.optimizer is state.optimizer
        failure = next(failures, None)
        while state.batch < BATCHES:
            train_batch(state)
            state.schedule.step()
            state.scaler.update(2.0**state.schedule.last_epoch)
            if state.batch == failure:
                raise hvd.HorovodInternalError("lost a rank")
            if state.batch == 3:
                state.commit()

    state = make_state(batch=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda step: 1.0 / (1 + step))
    schedule.last_epoch = 10 * hvd.rank()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))  # creates its tensors
    state = TorchState(state.model, state.optimizer, batch=0, schedule=schedule, scaler=scaler)
    with warned():
        train(state)
    assert (state.schedule, state.scaler) == (schedule, scaler)
    assert schedule.last_epoch == BATCHES
    assert scaler.get_scale() == 2.0**BATCHES
    assert state.optimizer.param_groups[0]["lr"] == RATE / (1 + BATCHES)


class Log:
    """Changes its dictionary in place when it loads a state, as some classes do."""

    def __init__(self) -> None:
        self.entries: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"entries": self.entries}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.entries.clear()
        self.entries.update(state["entries"])


@everywhere
def test_an_object_whose_state_dict_is_not_a_copy_is_shared_on_rank_0_too() -> None:
    state = TorchState(log=Log())
    state.log.entries["rank"] = hvd.rank()
    state.sync()
    assert state.log.entries == {"rank": 0}


@everywhere
def test_a_name_can_get_an_object_with_a_state_later_and_lose_it_again() -> None:
    state = make_state(batch=0, schedule=None)
    state.schedule = schedule = torch.optim.lr_scheduler.StepLR(state.optimizer, 1)
    state.sync()
    assert state.schedule is schedule and schedule.optimizer is state.optimizer
    schedule.last_epoch = 7
    state.restore()
    assert schedule.last_epoch == 0
    state.schedule = None
    state.save()
    state.sync()
    state.restore()
    assert state.schedule is None


class OfEachRank:
    per_rank = True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@everywhere
def test_wrong_use_is_an_error_that_names_the_rule() -> None:
    with pytest.raises(TypeError, match=r"`state` must be a TorchState or another State, but is a dict"):
        run(lambda state: None)({})
    for name in ("save", "_commits", "_resume"):
        with pytest.raises(ValueError, match=f"must not be named '{name}', which State has"):
            TorchState(**{name: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`numbers` must be equal on all ranks, but is a OfEachRank with a state"):
        TorchState(numbers=OfEachRank())
    for name in ("save", "restore", "sync"):
        with pytest.raises(NotImplementedError):
            getattr(hvd.elastic.State(hvd.broadcast_object, hvd.rank), name)()


@everywhere
def test_sync_shares_rank_0s_state_and_saves_it() -> None:
    state = make_state(batch=hvd.rank(), log=[hvd.rank()])
    torch.nn.init.constant_(state.model.weight, 1.0 + hvd.rank())
    for group in state.optimizer.param_groups:
        group["lr"] = 0.25 + hvd.rank()
    state.batch = 7 + hvd.rank()
    state.sync()
    assert (weight(state), state.batch, state.log) == (1.0, 7, [0])
    torch.nn.init.zeros_(state.model.weight)
    state.batch = 9
    state.restore()
    assert (weight(state), state.batch, state.optimizer.param_groups[0]["lr"]) == (1.0, 7, 0.25)


@everywhere
def test_restore_undoes_changes_inside_containers_and_tensors_each_time() -> None:
    state = TorchState(log=[1], table={"a": [1]}, tensor=torch.zeros(2))
    for _ in range(2):
        state.log.append(2)
        state.table["a"].append(2)
        state.tensor += 1
        state.restore()
        assert (state.log, state.table, state.tensor.tolist()) == ([1], {"a": [1]}, [0.0, 0.0])
    state.log.append(3)
    state.save()
    state.log.append(4)
    state.restore()
    assert state.log == [1, 3]


@everywhere
def test_setting_an_attribute_with_a_handler_saves_the_new_object() -> None:
    state = make_state(batch=0)
    other = torch.nn.Linear(2, 1)
    saved = other.weight.detach().clone()
    state.model = other
    torch.nn.init.zeros_(other.weight)
    state.restore()
    torch.testing.assert_close(state.model.weight.detach(), saved)


@everywhere
def test_the_registry_decides_how_objects_are_handled() -> None:
    class Counter:
        value = 0

    class CounterHandler(StateHandler):
        saved = 0

        def save(self) -> None:
            self.saved = self.value.value

        def restore(self) -> None:
            self.value.value = self.saved

        def sync(self) -> None:
            self.value.value = hvd.broadcast_object(self.value.value)

    with handled(Counter, CounterHandler):
        state: Any = TorchState(counter=Counter())
        state.counter.value = 3 + hvd.rank()
        state.sync()
        state.counter.value = 9
        state.restore()
        assert state.counter.value == 3


class Fragile:
    """Its state cannot be read on rank 0 once it is broken."""

    is_broken = False

    def state_dict(self) -> dict[str, Any]:
        if self.is_broken and hvd.rank() == 0:
            raise OSError("the disk is gone")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@everywhere
def test_an_object_whose_state_cannot_be_read_is_an_error_on_every_rank() -> None:
    state = TorchState(fragile=Fragile())
    state.sync()
    state.fragile.is_broken = True
    with pytest.raises((OSError, hvd.HorovodInternalError), match="the disk is gone"):
        state.sync()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
