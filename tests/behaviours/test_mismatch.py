"""Ranks that call different things: an error on every rank, and the next call works."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable

import pytest
import torch

import dualdist as hvd

from ..helpers.ranks import check_next_calls_work
from ..helpers.world import everywhere

pytestmark = pytest.mark.ranks(2, 3)

Calls = tuple[Callable[[], object], Callable[[], object]]


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


# What rank 0 calls, and what the other ranks call. The key is the difference that the message names first. Some calls
# have a line of their own, which the message must name.
CASES: dict[str, Calls] = {
    "shapes": (lambda: hvd.allreduce(ones(2)), lambda: hvd.allreduce(ones(3))),
    "shapes/dimensions": (lambda: hvd.allreduce(ones(2, 3)), lambda: hvd.allreduce(ones(6))),
    "shapes/large": (lambda: hvd.allreduce_(ones(5000)), lambda: hvd.allreduce_(ones(5001))),
    "shapes/group": (lambda: hvd.grouped_allreduce([ones(2), ones(2)]), lambda: hvd.grouped_allreduce([ones(2)])),
    "shapes/reducescatter": (lambda: hvd.reducescatter(ones(4)), lambda: hvd.reducescatter(ones(6))),
    "dtypes": (lambda: hvd.allreduce(ones(2)), lambda: hvd.allreduce(ones(2, dtype=torch.int32))),
    "dtypes/allgather": (lambda: hvd.allgather(ones(2)), lambda: hvd.allgather(ones(2, dtype=torch.float64))),
    "collectives": (lambda: hvd.allreduce(ones(2)), lambda: hvd.broadcast(ones(2), 0)),
    "collectives/barrier": (lambda: hvd.allreduce(ones(2)), lambda: hvd.barrier()),
    "collectives/object": (lambda: hvd.broadcast_object({}, 0), lambda: hvd.allgather(ones(2))),
    "collectives/async": (
        lambda: hvd.synchronize(hvd.allgather_async(ones(2))),
        lambda: hvd.synchronize(hvd.alltoall_async(ones(6))),
    ),
    "collectives/group": (lambda: hvd.allreduce(ones(2)), lambda: hvd.grouped_allreduce([ones(2)])),
    "op": (lambda: hvd.allreduce(ones(2), op=hvd.Sum), lambda: hvd.allreduce(ones(2), op=hvd.Max)),
    "op/reduce": (lambda: hvd.reduce(ones(2), 0, op=hvd.Sum), lambda: hvd.reduce(ones(2), 0, op=hvd.Max)),
    "prescale_factor": (lambda: hvd.allreduce(ones(2), prescale_factor=0.5), lambda: hvd.allreduce(ones(2))),
    "postscale_factor": (lambda: hvd.allreduce(ones(2), postscale_factor=0.5), lambda: hvd.allreduce(ones(2))),
    "root_rank": (lambda: hvd.broadcast(ones(2), 0), lambda: hvd.broadcast(ones(2), 1)),
    "root_rank/object": (lambda: hvd.broadcast_object("a", 0), lambda: hvd.broadcast_object("b", 1)),
    "root_rank/gather": (lambda: hvd.gather(ones(2), 0), lambda: hvd.gather(ones(2), 1)),
    "trailing_shapes": (lambda: hvd.allgather(ones(2, 3)), lambda: hvd.allgather(ones(2, 4))),
    "trailing_shape": (lambda: hvd.alltoall(ones(6, 3)), lambda: hvd.alltoall(ones(6, 4))),
    "shape": (lambda: hvd.broadcast(ones(2), 0), lambda: hvd.broadcast(ones(3), 0)),
    "parameters": (
        lambda: hvd.broadcast_parameters({"weight": ones(2)}, 0),
        lambda: hvd.broadcast_parameters({"bias": ones(2)}, 0),
    ),
    "name": (lambda: hvd.allreduce(ones(2), name="mine"), lambda: hvd.allreduce(ones(2), name="yours")),
    "process_set": (lambda: hvd.add_process_set([0]), lambda: hvd.add_process_set([1])),
}

ROW = re.compile(r"^  ranks? ([\d, ]+) called (\w+)\(.*\) at (.+):(\d+)$", re.MULTILINE)


def call_fails(first: Callable[[], object], others: Callable[[], object]) -> str:
    """Call `first` on rank 0 and `others` elsewhere; return the message of the error that every rank must raise."""
    call = first if hvd.rank() == 0 else others
    with pytest.raises(hvd.CollectiveMismatchError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("case", CASES)
@everywhere
def test_mismatch_is_an_error_on_every_rank_and_the_next_call_works(case: str) -> None:
    first, others = CASES[case]
    message = call_fails(first, others)
    assert message.startswith(f"Mismatched {case.partition('/')[0]} between ranks:")
    rows = ROW.findall(message)
    assert [ranks for ranks, _, _, _ in rows] == ["0", ", ".join(map(str, range(1, hvd.size())))]
    for (_, kind, file, line), call in zip(rows, (first, others), strict=True):
        assert file == __file__
        assert int(line) == call.__code__.co_firstlineno
        assert kind in linecache.getline(file, int(line))
    check_next_calls_work()


@everywhere
def test_the_error_names_every_differing_rank() -> None:
    with pytest.raises(hvd.CollectiveMismatchError) as caught:
        hvd.allreduce(torch.ones(hvd.rank() + 1), name="loss")
    for rank in range(hvd.size()):
        assert f"rank {rank} called allreduce(shapes=(({rank + 1},),)" in str(caught.value)
    assert "name='loss'" in str(caught.value)
    check_next_calls_work()


@everywhere
def test_async_mismatch_is_raised_at_synchronize_and_later_handles_work() -> None:
    wrong = hvd.allreduce_async(torch.ones(hvd.rank() + 1))
    right = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
    with pytest.raises(hvd.CollectiveMismatchError):
        hvd.synchronize(wrong)
    assert hvd.synchronize(right).tolist() == [hvd.size()] * 2
    assert hvd.synchronize(wrong) is None


@everywhere
def test_gradients_that_do_not_match_are_an_error_in_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    sums = hvd.allreduce(x, op=hvd.Sum).sum()
    if hvd.rank() == 0:
        with pytest.raises(hvd.CollectiveMismatchError):
            sums.backward()
    else:
        with pytest.raises(hvd.CollectiveMismatchError):
            hvd.broadcast(torch.ones(2), 0)
    check_next_calls_work()


@everywhere
def test_an_error_leaves_the_tensor_of_an_in_place_call_alone() -> None:
    tensor = torch.arange(4.0) if hvd.rank() == 0 else torch.arange(5.0)
    with pytest.raises(hvd.CollectiveMismatchError):
        hvd.allreduce_(tensor, op=hvd.Sum)
    assert torch.equal(tensor, torch.arange(float(len(tensor))))
    check_next_calls_work()
