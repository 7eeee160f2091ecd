"""allgather and grouped_allgather in all their forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..agreement.call import Kind
from ..agreement.connections import Verdict
from ..backends.base import Group
from ..compiling import not_compiled
from ..types import Average
from ..world import ProcessSetLike, channel_of, global_process_set
from .allreduce import allreduce_gradient, plan_allreduce
from .plan import Plan, check_tensors, make_call, planned
from .reduction import Reduction
from .wire import allgather_rows, dtype_name

ALLGATHER = Kind("allgather", "ALLGATHER")
GROUPED_ALLGATHER = Kind("grouped_allgather", "ALLGATHER")


@planned(ALLGATHER)
def plan_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, *, grouped: bool = False, process_set: ProcessSetLike
) -> Plan[tuple[Any, ...]]:
    """Return the plan of an allgather.

    Its result: for each of `tensors` the rows of all ranks, and at last a list of where those of this rank begin.
    """
    channel = channel_of(process_set)
    tensors = check_tensors(tensors, grouped=grouped)
    tables = [tensor if tensor.dim() else tensor.reshape(1) for tensor in tensors]
    call = make_call(
        GROUPED_ALLGATHER if grouped else ALLGATHER,
        name,
        count=tables[0].shape[0],
        trailing_shapes=tuple(tuple(table.shape[1:]) for table in tables),
        dtypes=tuple(dtype_name(table.dtype) for table in tables),
        device=tables[0].device.type,
    )

    def execute(group: Group, verdict: Verdict) -> tuple[Any, ...]:
        whole, starts = allgather_rows(group, tables, verdict.counts if len(tables) == 1 else None)
        return *whole, starts

    return Plan(process_set, channel, call, execute, tensors)


@not_compiled
def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
    *,
    gradient: int = Average,
) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated along dimension 0 in rank order; differentiable.

    Collective: every member of `process_set` must call it.

    Args:
        tensor: (n, ...), where n may differ between ranks and be 0; a number (0-dim) counts as (1,); any dtype.
        name: as for `allreduce`.
        gradient: Average (default), as in Horovod, for the average of the ranks' gradients; Sum for the gradient of the
            sum of all ranks' losses.

    Returns:
        (sum of n, ...), same dtype and device.

    Raises ValueError and HorovodInternalError as `allreduce` does.
    """
    plan = plan_allgather([tensor], name, process_set=process_set)
    gathered: torch.Tensor = plan.run(allgather_gradient, gradient)[0]
    return gathered


@not_compiled
def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> int:
    """Start an `allgather` and return a handle; `synchronize` returns the new tensor. Not differentiable.

    Collective like `allgather`, with the same arguments, shapes and errors.
    """
    return plan_allgather([tensor], name, process_set=process_set).submit(lambda outputs: outputs[0])


@not_compiled
def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
    *,
    gradient: int = Average,
) -> tuple[torch.Tensor, ...]:
    """Return `allgather` of each of `tensors`, as one operation and a tuple (as Horovod does); differentiable.

    Collective like `allgather`, with the same arguments, shapes and errors. The tensors may differ in shape and dtype,
    but not in device.
    """
    return plan_allgather(tensors, name, grouped=True, process_set=process_set).run(allgather_gradient, gradient)[:-1]


@not_compiled
def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> int:
    """Start a `grouped_allgather` and return a handle; `synchronize` returns the tuple of new tensors.

    Collective like `allgather`, with the same arguments, shapes and errors. Not differentiable.
    """
    return plan_allgather(tensors, name, grouped=True, process_set=process_set).submit(lambda outputs: outputs[:-1])


def allgather_gradient(ran: Any, *grads: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the gradients of allgather and grouped_allgather.

    This rank's rows of the average of all ranks' gradients (horovod/torch/mpi_ops.py:630), or of their sum.
    """
    plan = plan_allreduce(grads[:-1], Reduction(ran.gradient), grouped=True, process_set=ran.process_set)
    return [
        total.narrow(0, start, shape[0] if shape else 1).reshape(shape)
        for total, start, shape in zip(plan.run(allreduce_gradient), ran.numbers, ran.shapes, strict=True)
    ]
