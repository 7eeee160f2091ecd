"""elastic: states are saved, restored and shared, and training continues after a failed collective."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import dualdist as hvd
from dualdist.elastic import ElasticSampler, HostsUpdatedInterrupt, StateHandler, TorchState, run
from dualdist.elastic.state import get_handler_registry, set_handler_registry

from ..helpers.world import everywhere

BATCHES = 6
RATE, MOMENTUM = 0.5, 0.5


@contextmanager
def warned() -> Iterator[list[str]]:
    """Collect dualdist's log messages instead of printing them."""
    logger = logging.getLogger("dualdist")
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield messages
    finally:
        logger.propagate = True
        logger.removeHandler(handler)


def slope(batch: int) -> float:
    """Return this rank's gradient of the weight."""
    return float((batch + 1) * (hvd.rank() + 1))


def weight_after(batches: int) -> float:
    """Return the weight after training, by plain arithmetic."""
    weight = velocity = 0.0
    for batch in range(batches):
        velocity = (
            MOMENTUM * velocity + sum((batch + 1) * (rank + 1) for rank in range(hvd.size())) / hvd.size()
        )
        weight -= RATE * velocity
    return weight


def make_state(**values: Any) -> Any:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM))
    return TorchState(model, optimizer, **values)


def train_batch(state: Any) -> None:
    state.optimizer.zero_grad()
    (state.model.weight * slope(state.batch)).sum().backward()
    state.optimizer.step()
    state.batch += 1


def weight(state: Any) -> float:
    return float(state.model.weight.item())


@everywhere
def test_training_ends_with_the_weights_of_a_run_without_failure() -> None:
    failures = iter([3, 3, 5])
    calls = []

    @run
    def train(state: Any, factor: int, *, more: int) -> int:
        calls.append((state.batch, weight(state)))
        failure = next(failures, None)
        while state.batch < BATCHES:
            train_batch(state)
            if state.batch == failure:
                raise hvd.HorovodInternalError("lost a rank")
            if state.batch % 2 == 0:
                state.commit()
        return factor + more

    state = make_state(batch=0)
    with warned() as warnings:
        assert train(state, 1, more=2) == 3
    assert weight(state) == weight_after(BATCHES)
    assert calls == [(batch, weight_after(batch)) for batch in (0, 2, 2, 4)]
    assert warnings == 3 * ["Returning to the last commit, because a collective has failed: lost a rank"]


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_mismatch_returns_every_rank_to_the_last_commit() -> None:
    tries = []

    @run
    def train(state: Any) -> None:
        tries.append(state.batch)
        while state.batch < BATCHES:
            train_batch(state)
            if len(tries) == 1 and state.batch == 3:
                hvd.allreduce(torch.ones(1 + hvd.rank()))
            if state.batch == 2:
                state.commit()

    state = make_state(batch=0)
    with warned():
        train(state)
    assert tries == [0, 2]
    assert weight(state) == weight_after(BATCHES)


@everywhere
def test_the_world_is_joined_again_and_callbacks_are_called() -> None:
    events = []

    @run
    def train(state: Any) -> None:
        events.append(f"train {state.step}")
        if state.step == 0:
            state.step = 1
            raise HostsUpdatedInterrupt(skip_sync=False)

    backend, size = hvd.backend_name(), hvd.size()
    state = TorchState(step=0)
    state.register_reset_callbacks([lambda: events.append("first"), lambda: events.append("second")])
    train(state)
    assert events == ["train 0", "first", "second", "train 1"]
    assert (hvd.backend_name(), hvd.size()) == (backend, size)
    assert hvd.allgather_object(hvd.rank()) == list(range(size))


@everywhere
def test_a_change_of_hosts_seen_by_rank_0_interrupts_every_rank_without_a_restore() -> None:
    @run
    def train(state: Any) -> int:
        state.calls += 1
        if hvd.rank() == 0 and state.calls == 1:
            state.on_hosts_updated(1.0, 2)
        state.kept = 5
        state.check_host_updates()
        return int(state.kept)

    state = TorchState(calls=0, kept=0)
    assert train(state) == 5
    assert state.calls == 2


@pytest.mark.parametrize(("change", "shared"), [(1, False), (2, True), (3, True)])
@everywhere
def test_state_is_shared_again_unless_hosts_were_only_removed(change: int, shared: bool) -> None:
    seen = []

    @run
    def train(state: Any) -> None:
        seen.append(state.value)
        if len(seen) == 1:
            state.value = 10 + hvd.rank()
            state.on_hosts_updated(1.0, change)
            state.commit()

    train(TorchState(value=1))
    assert seen == [1, 10 if shared else 10 + hvd.rank()]


@everywhere
def test_other_errors_pass_through() -> None:
    @run
    def train(state: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(TorchState())


@everywhere
def test_training_ends_after_ten_failures_without_a_commit() -> None:
    calls = []

    @run
    def train(state: Any) -> None:
        calls.append(state.step)
        state.step += 1
        if state.step <= 3:
            state.commit()
        raise hvd.HorovodInternalError("each time")

    with (
        warned(),
        pytest.raises(hvd.HorovodInternalError, match=r"10 times in a row without a commit.*: each time"),
    ):
        train(TorchState(step=0))
    assert calls == [0, 1, 2, *[3] * 9]


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


@everywhere
def test_a_state_with_its_own_commit_has_no_limit_of_failures() -> None:
    class Own(TorchState):
        def commit(self) -> None:
            self.save()
            self.check_host_updates()

    @run
    def train(state: Any) -> None:
        while state.step < 20:
            state.step += 1
            state.commit()
            raise hvd.HorovodInternalError("each time")

    state = Own(step=0)
    with warned() as messages:
        train(state)
    assert (state.step, len(messages)) == (20, 20)


class OfEachRank:
    per_rank = True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@everywhere
def test_wrong_use_is_an_error_that_names_the_rule() -> None:
    with pytest.raises(TypeError, match=r"`state` must be a TorchState or another State, but is a dict"):
        run(lambda state: None)({})
    with pytest.raises(TypeError, match="`callbacks` must be a list of functions"):
        TorchState().register_reset_callbacks(print)  # type: ignore[arg-type]
    for name in ("save", "_commits", "_resume"):
        with pytest.raises(ValueError, match=f"must not be named '{name}', which State has"):
            TorchState(**{name: 1})  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="`numbers` must be equal on all ranks, but is a OfEachRank with a state"
    ):
        TorchState(numbers=OfEachRank())


@everywhere
def test_a_sampler_without_set_epoch_is_warned_about_once_on_rank_0() -> None:
    sampler = ElasticSampler(range(5))
    with warned() as messages:
        for batch in range(3 * len(sampler)):
            sampler.record_batch(batch, 1)
    assert len(messages) == (1 if hvd.rank() == 0 else 0)
    assert all("all 5 samples of epoch 0" in message for message in messages)
    with warned() as messages:
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for batch in range(len(sampler)):
                sampler.record_batch(batch, 1)
    assert not messages


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
def test_optimizer_state_can_be_restored_twice() -> None:
    state = make_state(batch=0)
    train_batch(state)
    state.save()
    for _ in range(2):
        train_batch(state)
        train_batch(state)
        assert weight(state) == weight_after(3)
        state.restore()
        assert (weight(state), state.batch) == (weight_after(1), 1)


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
def test_a_sampler_continues_at_the_commit() -> None:
    seen: list[int] = []
    lost = [2 * hvd.size() + hvd.rank()]

    @run
    def train(state: Any) -> None:
        for place, index in enumerate(state.sampler):
            seen.append(index)
            state.sampler.record_batch(place, 1)
            if len(seen) == 2:
                state.commit()
            if len(seen) == 3 and lost:
                seen.remove(lost.pop())
                raise hvd.HorovodInternalError("lost a rank")

    state = TorchState(sampler=ElasticSampler(range(4 * hvd.size()), shuffle=False))
    with warned():
        train(state)
    assert sorted(index for ranks in hvd.allgather_object(seen) for index in ranks) == list(
        range(4 * hvd.size())
    )


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

    before = get_handler_registry()
    set_handler_registry([(Counter, CounterHandler), *before])
    try:
        state: Any = TorchState(counter=Counter())
        state.counter.value = 3 + hvd.rank()
        state.sync()
        state.counter.value = 9
        state.restore()
        assert state.counter.value == 3
    finally:
        set_handler_registry(before)


@pytest.mark.ranks(2, 3)
@everywhere
def test_the_first_arguments_of_init_are_used_again() -> None:
    hvd.shutdown()
    ranks = list(range(hvd.launch_info().size))
    some = hvd.ProcessSet(ranks[:1])
    hvd.init(process_sets=[some])

    @run
    def train(state: Any) -> None:
        state.tries += 1
        if state.tries == 1:
            raise HostsUpdatedInterrupt(skip_sync=True)

    train(TorchState(tries=0))
    assert some.process_set_id == 1
    if some.included():
        hvd.barrier(process_set=some)
    hvd.shutdown()
    hvd.init()
