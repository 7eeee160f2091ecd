"""Random collectives with known results, also in two threads, and one call that is wrong on one rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import dualdist as hvd

TEN = torch.ones(10)
RIGHT: tuple[Any, ...] = (hvd.allreduce, TEN, {"op": hvd.Sum})
WRONG: tuple[tuple[Any, ...], ...] = (
    (hvd.allreduce, torch.ones(7), {"op": hvd.Sum}),
    (hvd.allreduce, torch.ones(10, dtype=torch.int64), {"op": hvd.Sum}),
    (hvd.allreduce, TEN, {"op": hvd.Max}),
    (hvd.allreduce, TEN, {"op": 99}),
    (hvd.allreduce, "ten", {"op": hvd.Sum}),
    (hvd.allreduce, TEN, {"op": hvd.Sum, "process_set": 3}),
    (hvd.allgather, TEN, {}),
    (hvd.broadcast, TEN, {"root_rank": 99}),
    (hvd.alltoall, TEN, {"splits": torch.tensor([-1])}),
    (hvd.broadcast_object, lambda: 1, {"root_rank": 0}),
)
"""Function, first argument and the others. All are called in the same line, as in a script."""


class WrongNumbers(AssertionError):
    """A call returned something else than plain arithmetic does."""


def check(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise WrongNumbers(f"{what}: {str(found)[:200]} instead of {str(expected)[:200]}")


def call_some(numbers: random.Random) -> None:
    """Make some random collectives. Collective: `numbers` must be in the same state on all ranks."""
    for call in numbers.sample(CALLS, 3):
        call(numbers)


def call_wrongly(is_here: bool, choice: int) -> None:
    """Make a call that `is_here` makes wrongly; it must raise everywhere. Collective."""
    function, first, others = WRONG[choice % len(WRONG)] if is_here else RIGHT
    try:
        function(first, **others)
    except (ValueError, TypeError, hvd.HorovodInternalError):
        return
    raise WrongNumbers(f"wrong call {choice % len(WRONG)} raised no error")


def call_in_threads() -> None:
    """Make named allreduces in two threads, in an order of their own on each rank. Collective."""

    def work(thread: int) -> None:
        for number in range(20):
            value = float((number + 1) * (thread + 1))
            found = hvd.allreduce(torch.full((700,), value), op=hvd.Sum, name=f"thread {thread} call {number}")
            check(set(found.tolist()), {value * hvd.size()}, "allreduce in a thread")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


def _total(of: Callable[[int], int]) -> int:
    return sum(of(rank) for rank in range(hvd.size()))


def _allreduce(numbers: random.Random) -> None:
    length, factor = numbers.choice((1, 100, 5000, 300_000)), numbers.randrange(1, 9)
    found = hvd.allreduce(torch.full((length,), float(factor * (hvd.rank() + 1))), op=hvd.Sum)
    check(set(found.tolist()), {float(_total(lambda rank: factor * (rank + 1)))}, "allreduce")


def _asynchronous(numbers: random.Random) -> None:
    lengths = [numbers.choice((1, 500, 20_000)) for _ in range(4)]
    handles = [hvd.allreduce_async(torch.full((n,), n + hvd.rank()), op=hvd.Sum) for n in lengths]
    for place in random.Random(hvd.rank()).sample(range(4), 4):
        expected = {_total(lambda rank, n=lengths[place]: n + rank)}  # type: ignore[misc]
        check(set(hvd.synchronize(handles[place]).tolist()), expected, "allreduce_async")


def _allgather(numbers: random.Random) -> None:
    rows = [numbers.randrange(4) for _ in range(hvd.size())]
    found = hvd.allgather(torch.full((rows[hvd.rank()], 3), hvd.rank()))
    check(found[:, 0].tolist(), [rank for rank, count in enumerate(rows) for _ in range(count)], "allgather")


def _broadcast(numbers: random.Random) -> None:
    root, length = numbers.randrange(hvd.size()), numbers.choice((1, 70_000))
    check(set(hvd.broadcast(torch.full((length,), hvd.rank()), root_rank=root).tolist()), {root}, "broadcast")
    check(hvd.broadcast_object({"rank": hvd.rank()}, root_rank=root), {"rank": root}, "broadcast_object")


def _alltoall(numbers: random.Random) -> None:
    found, _ = hvd.alltoall(
        torch.full((2 * hvd.size(),), hvd.rank()), splits=torch.full((hvd.size(),), 2, dtype=torch.int32)
    )
    check(found.tolist(), [rank for rank in range(hvd.size()) for _ in range(2)], "alltoall")


def _reducescatter(numbers: random.Random) -> None:
    found = hvd.reducescatter(torch.arange(3 * hvd.size()), op=hvd.Sum)
    first = 3 * hvd.rank()
    check(found.tolist(), [hvd.size() * number for number in range(first, first + 3)], "reducescatter")


def _process_set(numbers: random.Random) -> None:
    members = sorted(numbers.sample(range(hvd.size()), hvd.size() - 1))
    made = hvd.add_process_set(members)
    if made.included():
        found = hvd.allreduce(torch.tensor([hvd.rank()]), op=hvd.Sum, process_set=made)
        check(found.tolist(), [sum(members)], "allreduce of a process set")
    hvd.remove_process_set(made)


CALLS: tuple[Callable[[random.Random], None], ...] = (
    _allreduce,
    _allreduce,
    _asynchronous,
    _allgather,
    _broadcast,
    _alltoall,
    _reducescatter,
    _process_set,
    lambda numbers: hvd.barrier(),
)
