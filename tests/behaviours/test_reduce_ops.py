"""`op=`: Horovod's constants, torch's ReduceOp with the same meaning, and nothing else."""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ReduceOp

import dualdist as hvd

from ..helpers.ranks import check_next_calls_work
from ..helpers.world import everywhere

EXPECTED: dict[str, tuple[int, Callable[[list[float]], float]]] = {
    "SUM": (hvd.Sum, sum),
    "AVG": (hvd.Average, statistics.fmean),
    "MIN": (hvd.Min, min),
    "MAX": (hvd.Max, max),
    "PRODUCT": (hvd.Product, math.prod),
}
"""Op of torch: Horovod's constant for it, and what it computes from the numbers of the ranks."""


def of_optimizer(op: Any) -> torch.Tensor:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=op)
    weight.mul(mine()).sum().backward()
    optimizer.step()
    return -weight.detach()


def of_reduce(op: Any) -> torch.Tensor:
    return hvd.broadcast(hvd.reduce(mine(), 0, op=op), 0)


def of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks after a reducescatter."""
    return hvd.allgather(rows)


CALLS: dict[str, Callable[[Any], torch.Tensor]] = {
    "allreduce": lambda op: hvd.allreduce(mine(), op=op),
    "allreduce_": lambda op: hvd.allreduce_(mine(), op=op),
    "allreduce_async": lambda op: hvd.synchronize(hvd.allreduce_async(mine(), op=op)),
    "allreduce_async_": lambda op: hvd.synchronize(hvd.allreduce_async_(mine(), op=op)),
    "grouped_allreduce": lambda op: hvd.grouped_allreduce([mine()], op=op)[0],
    "grouped_allreduce_": lambda op: hvd.grouped_allreduce_([mine()], op=op)[0],
    "grouped_allreduce_async": lambda op: hvd.synchronize(hvd.grouped_allreduce_async([mine()], op=op))[0],
    "grouped_allreduce_async_": lambda op: hvd.synchronize(hvd.grouped_allreduce_async_([mine()], op=op))[0],
    "reduce": of_reduce,
    "reducescatter": lambda op: of_rows(hvd.reducescatter(mine(), op=op)),
    "reducescatter_async": lambda op: of_rows(hvd.synchronize(hvd.reducescatter_async(mine(), op=op))),
    "grouped_reducescatter": lambda op: of_rows(hvd.grouped_reducescatter([mine()], op=op)[0]),
    "grouped_reducescatter_async": lambda op: of_rows(
        hvd.synchronize(hvd.grouped_reducescatter_async([mine()], op=op))[0]
    ),
    "sparse_allreduce_async": lambda op: hvd.sparse_allreduce_async(mine().to_sparse(), None, op)().to_dense(),
    "DistributedOptimizer": of_optimizer,
}
"""Each function with `op`, called with the tensor `mine()`; the result is the same on every rank."""

SUMS_ONLY = {name for name in CALLS if "scatter" in name or "sparse" in name} | {"DistributedOptimizer"}
"""The functions that know Sum and Average, and perhaps Adasum."""


def mine() -> torch.Tensor:
    return torch.full((3,), hvd.rank() + 2.0)


def of_all(combine: Callable[[list[float]], float]) -> list[float]:
    return [combine([rank + 2.0 for rank in range(hvd.size())])] * 3


def test_the_calls_are_all_functions_with_op() -> None:
    functions = {name for name in hvd.__all__ if inspect.isfunction(getattr(hvd, name))}
    with_op = {name for name in functions if "op" in inspect.signature(getattr(hvd, name)).parameters}
    assert with_op == CALLS.keys()


@pytest.mark.parametrize("kind", CALLS)
@everywhere
def test_ops_of_torch_mean_what_they_say(kind: str) -> None:
    for torch_name, (constant, combine) in EXPECTED.items():
        of_torch = getattr(ReduceOp, torch_name)
        for op in (constant, of_torch, ReduceOp(of_torch)):
            if kind in SUMS_ONLY and torch_name not in ("SUM", "AVG"):
                with pytest.raises((ValueError, hvd.HorovodInternalError), match=r"`op` must be .*, but is"):
                    CALLS[kind](op)
            else:
                assert CALLS[kind](op).tolist() == of_all(combine)


@everywhere
def test_an_op_in_the_place_of_average_is_refused() -> None:
    for wrong in (hvd.Sum, ReduceOp.AVG):
        with pytest.raises(TypeError, match=r"`average` must be True, False or None, .* Use `op=`"):
            hvd.allreduce(mine(), wrong)  # type: ignore[arg-type]
    check_next_calls_work()
