"""elastic.run: training continues after a failed collective and after a change of hosts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dualdist as hvd
from dualdist.elastic import HostsUpdatedInterrupt, TorchState, run

from ..helpers.collected_warnings import warned
from ..helpers.elastic_training import BATCHES, make_state, train_batch, weight, weight_after
from ..helpers.world import everywhere


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


@pytest.mark.parametrize("error", [hvd.HorovodInternalError("lost a rank"), HostsUpdatedInterrupt(skip_sync=False)])
@everywhere
def test_a_metric_counts_the_samples_of_every_batch_once(error: Exception) -> None:
    calls = []

    @run
    def train(state: Any) -> int:
        calls.append(hvd.rank())
        state.total.update(torch.tensor([hvd.rank() + 10 * len(calls)]))
        if len(calls) == 1:
            state.commit()
            if isinstance(error, hvd.HorovodInternalError):
                state.total.update(torch.tensor([1000]))
            raise error
        return int(state.total.compute())

    with warned():
        total = train(TorchState(total=hvd.metrics.Sum(dtype=torch.int64)))
    assert total == sum((rank + 10) + (rank + 20) for rank in range(hvd.size()))


@pytest.mark.parametrize("change", [1, 3], ids=["removed", "added"])
@pytest.mark.ranks(2, 3)
@everywhere
def test_a_metric_keeps_the_samples_of_a_rank_that_leaves(change: int) -> None:
    state: Any = TorchState(total=hvd.metrics.Sum(dtype=torch.int64))
    state.sync()
    state.total.update(torch.tensor([10 + hvd.rank()]))
    state.on_hosts_updated(1.0, change)
    with pytest.raises(HostsUpdatedInterrupt) as raised:
        state.check_host_updates()
    if hvd.rank() == 1:
        state = TorchState(total=hvd.metrics.Sum(dtype=torch.int64))  # another process in its place
    else:
        state.on_reset()
    if not raised.value.skip_sync:
        state.sync()
    assert int(state.total.compute()) == sum(10 + rank for rank in range(hvd.size()))


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
        if state.step <= 1:
            state.commit()
        raise hvd.HorovodInternalError("each time")

    with warned(), pytest.raises(hvd.HorovodInternalError, match=r"10 times in a row without a commit.*: each time"):
        train(TorchState(step=0))
    assert calls == [0, *[1] * 9]


@everywhere
def test_a_state_with_its_own_commit_has_no_limit_of_failures() -> None:
    class Own(TorchState):
        def commit(self) -> None:
            self.save()
            self.check_host_updates()

    @run
    def train(state: Any) -> None:
        while state.step < 12:  # the limit of other states is 10
            state.step += 1
            state.commit()
            raise hvd.HorovodInternalError("each time")

    state = Own(step=0)
    with warned() as messages:
        train(state)
    assert (state.step, len(messages)) == (12, 12)


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
