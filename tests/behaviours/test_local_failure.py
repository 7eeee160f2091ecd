"""A call that one rank cannot make: a ValueError there, and nobody is left waiting."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dualdist as hvd

from ..helpers.ranks import check_next_calls_work, is_last
from ..helpers.world import everywhere

pytestmark = pytest.mark.ranks(2, 3)

# Each call is wrong on the last rank alone. test_wrong_arguments.py has every collective with wrong values on rank 0.
CALLS: dict[str, Callable[[bool], object]] = {
    "allreduce large": lambda wrong: hvd.allreduce_(torch.ones(5000), op=17 if wrong else hvd.Sum),
    "allreduce_async": lambda wrong: hvd.synchronize(hvd.allreduce_async(torch.ones(2), op=17 if wrong else 1)),
    "allgather": lambda wrong: hvd.allgather(torch.ones(2).to_sparse() if wrong else torch.ones(2)),
    "broadcast_parameters": lambda wrong: hvd.broadcast_parameters({"x": torch.ones(6)}, 99 if wrong else 0),
    "broadcast_object": lambda wrong: hvd.broadcast_object(1, 99 if wrong else 0),
    "add_process_set": lambda wrong: hvd.add_process_set([99] if wrong else [0]),
    "add_process_set again": lambda wrong: hvd.add_process_set(hvd.global_process_set if wrong else [0]),
}


@pytest.mark.parametrize("kind", CALLS)
@everywhere
def test_partners_of_a_failed_call_raise_and_the_next_call_works(kind: str) -> None:
    if is_last():
        with pytest.raises(ValueError, match="must"):
            CALLS[kind](True)
    else:
        with pytest.raises(hvd.HorovodInternalError, match="must") as caught:
            CALLS[kind](False)
        assert f"rank {hvd.size() - 1} failed" in str(caught.value) and __file__ in str(caught.value)
    check_next_calls_work()


@pytest.mark.parametrize("kind", CALLS)
@everywhere
def test_a_failed_call_that_nobody_else_made_disturbs_nobody(kind: str) -> None:
    if is_last():
        for _ in range(3):
            with pytest.raises(ValueError, match="must"):
                CALLS[kind](True)
    check_next_calls_work()
    hvd.barrier()


@everywhere
def test_a_failed_call_among_asynchronous_ones_leaves_the_handles_alone() -> None:
    first = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
    if is_last():
        with pytest.raises(ValueError, match="must"):
            hvd.broadcast_async(torch.ones(2), 99)
    second = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
    assert hvd.synchronize(first).tolist() == [hvd.size()] * 2
    assert hvd.synchronize(second).tolist() == [hvd.size()] * 3


@everywhere
def test_a_failed_call_before_a_join_disturbs_nobody() -> None:
    if is_last():
        with pytest.raises(ValueError, match="must"):
            hvd.broadcast(torch.ones(2), 99)
    assert 0 <= hvd.join() < hvd.size()
    check_next_calls_work()


@everywhere
def test_a_process_set_that_one_rank_cannot_remove_stays() -> None:
    chosen = hvd.add_process_set([0])
    error: type[Exception] = TypeError if is_last() else hvd.HorovodInternalError
    with pytest.raises(error, match="`process_set` must be a ProcessSet"):
        hvd.remove_process_set([0] if is_last() else chosen)  # type: ignore[arg-type]
    check_next_calls_work()
    assert hvd.remove_process_set(chosen)
