"""Calls that the ranks make in different orders: matched by kind and name, those without a name by their order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.files import wait_for
from ..helpers.ranks import check_next_calls_work, is_last
from ..helpers.world import everywhere

pytestmark = pytest.mark.ranks(2, 3)


def rotated(items: list[str]) -> list[str]:
    """Return `items` in an order of this rank."""
    shift = hvd.rank() % len(items)
    return items[shift:] + items[:shift]


def ranks_sum(factor: float = 1.0) -> float:
    return factor * sum(range(1, hvd.size() + 1))


@pytest.mark.parametrize("numel", [1, 5000])
@everywhere
def test_asynchronous_calls_match_by_name(numel: int) -> None:
    names = [f"layer{number}.weight" for number in range(7)]
    for _ in range(3):
        handles = {}
        for name in rotated(names):
            held = torch.full((numel,), names.index(name) * (hvd.rank() + 1.0))
            handles[name] = hvd.allreduce_async_(held, name=name, op=hvd.Sum)
        for place, name in enumerate(names):
            assert hvd.synchronize(handles[name]).tolist() == [ranks_sum(place)] * numel
    check_next_calls_work()


@everywhere
def test_calls_of_every_kind_match_in_any_order_also_under_one_name() -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = torch.full((size, 2), rank + 1.0)
    started: dict[str, Callable[[], int]] = {
        "allreduce": lambda: hvd.allreduce_async(mine, op=hvd.Sum, name="x"),
        "grouped_allreduce": lambda: hvd.grouped_allreduce_async([mine, mine[:1]], op=hvd.Max, name="x"),
        "allgather": lambda: hvd.allgather_async(mine[: rank + 1], name="x"),
        "grouped_allgather": lambda: hvd.grouped_allgather_async([mine[:1]]),
        "broadcast": lambda: hvd.broadcast_async(mine, size - 1, name="x"),
        "alltoall": lambda: hvd.alltoall_async(mine, name="x"),
        "reducescatter": lambda: hvd.reducescatter_async(mine, op=hvd.Sum),
        "grouped_reducescatter": lambda: hvd.grouped_reducescatter_async([mine], op=hvd.Sum),
    }
    handles = {kind: started[kind]() for kind in rotated(list(started))}
    results = {kind: hvd.synchronize(handle) for kind, handle in handles.items()}
    ranks = range(1, size + 1)
    assert results["allreduce"][0, 0] == ranks_sum()
    assert [output[0, 0] for output in results["grouped_allreduce"]] == [size, size]
    assert results["allgather"][:, 0].tolist() == [other for other in ranks for _ in range(other)]
    assert results["grouped_allgather"][0][:, 0].tolist() == list(ranks)
    assert results["broadcast"][0, 0] == size
    assert results["alltoall"][0][:, 0].tolist() == list(ranks)
    assert results["reducescatter"].tolist() == [[ranks_sum()] * 2]
    assert results["grouped_reducescatter"][0].tolist() == [[ranks_sum()] * 2]
    check_next_calls_work()


@everywhere
def test_a_synchronous_call_passes_asynchronous_ones_that_other_ranks_have_not_made() -> None:
    early = [hvd.allreduce_async(torch.ones(3), name="late", op=hvd.Sum)] if is_last() else []
    assert hvd.allreduce(torch.ones(2), name="first", op=hvd.Sum).tolist() == [hvd.size()] * 2
    assert hvd.broadcast_object(hvd.rank(), 0) == 0
    assert [hvd.poll(handle) for handle in early] == [False] * len(early)
    hvd.barrier()
    late = early[0] if early else hvd.allreduce_async(torch.ones(3), name="late", op=hvd.Sum)
    assert hvd.synchronize(late).tolist() == [hvd.size()] * 3
    check_next_calls_work()


@everywhere
def test_calls_without_a_name_match_by_their_order_within_a_kind() -> None:
    first, second = torch.full((2,), 1.0), torch.full((5000,), 2.0)
    if is_last():
        gathered = hvd.allgather_async(first)
        reduced = [hvd.allreduce_async(each, op=hvd.Sum) for each in (first, second)]
    else:
        reduced = [hvd.allreduce_async(each, op=hvd.Sum) for each in (first, second)]
        gathered = hvd.allgather_async(first)
    assert hvd.synchronize(reduced[1]).tolist() == [2 * hvd.size()] * 5000
    assert hvd.synchronize(gathered).tolist() == [1] * 2 * hvd.size()
    assert hvd.synchronize(reduced[0]).tolist() == [hvd.size()] * 2


@everywhere
def test_hooks_may_reduce_gradients_in_another_order_on_each_rank() -> None:
    torch.manual_seed(0)
    layers = {str(number): nn.Parameter(torch.zeros(3)) for number in range(5)}
    handles: dict[str, int] = {}

    def reduce(name: str) -> Callable[[torch.Tensor], None]:
        def hook(param: torch.Tensor) -> None:
            assert param.grad is not None
            handles[name] = hvd.allreduce_async_(param.grad, name=name)

        return hook

    for name, param in layers.items():
        param.register_post_accumulate_grad_hook(reduce(name))
    for _ in range(3):
        loss = torch.zeros(())
        for name in rotated(list(layers)):  # backward goes through the terms of the sum in this order, reversed
            loss = loss + (layers[name].sum() * (int(name) + hvd.rank()))
        loss.backward()
        for name in layers:
            hvd.synchronize(handles[name])
        mean = (hvd.size() - 1) / 2
        for name, param in layers.items():
            assert param.grad is not None
            assert param.grad.tolist() == pytest.approx([int(name) + mean] * 3)
            param.grad = None


@everywhere
def test_ranks_wait_for_one_that_still_computes(tmp_path: Path) -> None:
    marker = tmp_path / "go"
    if is_last():
        other = hvd.allreduce_async(torch.ones(1), name="other", op=hvd.Sum)
        wait_for([marker])
        assert hvd.allreduce(torch.ones(1), name="mine", op=hvd.Sum).item() == hvd.size()
    else:
        mine = hvd.allreduce_async(torch.ones(1), name="mine", op=hvd.Sum)
        if hvd.rank() == 0:
            marker.touch()
        assert hvd.synchronize(mine).item() == hvd.size()
        other = hvd.allreduce_async(torch.ones(1), name="other", op=hvd.Sum)
    assert hvd.synchronize(other).item() == hvd.size()


@everywhere
def test_threads_may_make_calls_in_any_order() -> None:
    sums: dict[str, float] = {}

    def reduce(name: str) -> None:
        for number in range(10):
            total = hvd.allreduce(torch.full((2,), float(number)), name=f"{name}.{number}", op=hvd.Sum)
            sums[f"{name}.{number}"] = total[0].item()

    threads = [threading.Thread(target=reduce, args=(name,)) for name in rotated(["a", "b", "c"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == {f"{name}.{number}": float(number * hvd.size()) for name in "abc" for number in range(10)}
    check_next_calls_work()


@everywhere
def test_a_thread_may_make_the_call_that_the_others_wait_for(tmp_path: Path) -> None:
    """The main thread waits for a call that the other ranks make later."""
    marker, sums = tmp_path / "go", []

    def reduce() -> None:
        wait_for([marker])
        sums.append(hvd.allreduce(torch.ones(1), name="of a thread", op=hvd.Sum).item())

    if is_last():
        thread = threading.Thread(target=reduce)
        thread.start()
        handle = hvd.allreduce_async(torch.ones(1), name="of all", op=hvd.Sum)
        marker.touch()
        total = hvd.synchronize(handle)
        thread.join()
    else:
        reduce()
        total = hvd.allreduce(torch.ones(1), name="of all", op=hvd.Sum)
    assert sums == [hvd.size()] and total.item() == hvd.size()


@everywhere
def test_process_sets_may_change_between_asynchronous_calls() -> None:
    early = [hvd.allreduce_async(torch.ones(1), name="late", op=hvd.Sum)] if hvd.rank() == 0 else []
    chosen = hvd.add_process_set([hvd.size() - 1])
    if chosen.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=chosen).item() == 1
    hvd.remove_process_set(chosen)
    late = early[0] if early else hvd.allreduce_async(torch.ones(1), name="late", op=hvd.Sum)
    assert hvd.synchronize(late).item() == hvd.size()


@everywhere
def test_a_rank_may_join_with_calls_pending_that_the_others_make_later() -> None:
    rank, size = hvd.rank(), hvd.size()
    if rank == 0:
        handle = hvd.allreduce_async(torch.full((2,), 5.0), name="of all", op=hvd.Sum)
    else:
        assert hvd.allreduce(torch.ones(2), name="of the others", op=hvd.Sum).tolist() == [size - 1] * 2
        handle = hvd.allreduce_async(torch.full((2,), 1.0), name="of all", op=hvd.Sum)
    assert 0 <= hvd.join() < size
    assert hvd.synchronize(handle).tolist() == [5 + size - 1] * 2
    check_next_calls_work()


@everywhere
def test_gradients_and_other_calls_match_in_any_order() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    for _ in range(2):
        optimizer.zero_grad()
        before = [hvd.allreduce_async(torch.ones(1), name="loss", op=hvd.Sum)] if is_last() else []
        (weight.sum() * (hvd.rank() + 1)).backward()
        optimizer.step()
        loss = before[0] if before else hvd.allreduce_async(torch.ones(1), name="loss", op=hvd.Sum)
        assert hvd.synchronize(loss).item() == hvd.size()
    assert weight.tolist() == pytest.approx([-(hvd.size() + 1)] * 2)
    check_next_calls_work()


@everywhere
def test_backwards_of_two_optimizers_in_another_order_are_an_error_on_every_rank() -> None:
    weights = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    kept = [hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0)) for weight in weights]
    with pytest.raises(hvd.CollectiveMismatchError, match="Mismatched grad_sync") as caught:
        weights[is_last()].sum().backward()
    assert f"rank {hvd.size() - 1} called gradient synchronization" in str(caught.value)
    check_next_calls_work()
    for weight in weights:
        weight.grad = None
        (weight.sum() * (hvd.rank() + 1)).backward()
        assert weight.grad is not None and weight.grad.tolist() == [(hvd.size() + 1) / 2] * 3
    assert len(kept) == 2


# Programs in which every rank waits for a call that another one does not make. Each is what the last rank does, and the
# others, after which no rank can make another call.
def wait_for_names(name: str, *pending: str) -> None:
    for other in pending:
        hvd.allreduce_async(torch.ones(2), name=other)
    hvd.synchronize(hvd.allreduce_async(torch.ones(2), name=name))


STUCK: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "names": (lambda: wait_for_names("a"), lambda: wait_for_names("b")),
    "with others pending": (lambda: wait_for_names("a", "c"), lambda: wait_for_names("b", "d", "c")),
    "synchronous": (lambda: hvd.allreduce(torch.ones(1), name="a"), lambda: wait_for_names("b")),
    "barrier": (hvd.barrier, lambda: wait_for_names("a")),
    "object": (lambda: hvd.broadcast_object(1, 0), hvd.barrier),
    "process set": (lambda: hvd.add_process_set([0]), hvd.barrier),
}


@pytest.mark.parametrize("case", STUCK)
@everywhere
def test_when_nobody_can_continue_every_rank_raises_and_the_next_call_works(case: str) -> None:
    last, others = STUCK[case]
    with pytest.raises(hvd.CollectiveMismatchError, match=r"Mismatched (name|collectives) between ranks") as caught:
        (last if is_last() else others)()
    assert f"rank {hvd.size() - 1} called" in str(caught.value) and __file__ in str(caught.value)
    check_next_calls_work()


@everywhere
def test_calls_that_nobody_waits_for_raise_too_when_nobody_can_continue() -> None:
    alone = hvd.allreduce_async(torch.ones(1), name=f"alone {hvd.rank()}")
    with pytest.raises(hvd.CollectiveMismatchError, match=r"has started allreduce\(.*name='alone 0'"):
        hvd.synchronize(hvd.allgather_async(torch.ones(1), name=str(hvd.rank())))
    with pytest.raises(hvd.CollectiveMismatchError):
        hvd.synchronize(alone)
    check_next_calls_work()


@everywhere
def test_idle_threads_do_not_hide_that_nobody_can_continue() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        assert pool.submit(hvd.rank).result() == hvd.rank()
        with pytest.raises(hvd.CollectiveMismatchError, match="Mismatched name"):
            hvd.allreduce(torch.ones(1), name=str(hvd.rank()))
    check_next_calls_work()


@everywhere
def test_when_a_thread_ends_without_the_missing_call_every_rank_raises(tmp_path: Path) -> None:
    marker = tmp_path / "go"
    thread = threading.Thread(target=wait_for, args=([marker],))
    thread.start()
    handle = hvd.allreduce_async(torch.ones(1), name=str(hvd.rank()))
    timer = threading.Timer(0.1, marker.touch)
    timer.start()
    with pytest.raises(hvd.CollectiveMismatchError, match="Mismatched name"):
        hvd.synchronize(handle)
    thread.join()
    check_next_calls_work()
