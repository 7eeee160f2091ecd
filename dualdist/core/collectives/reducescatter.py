"""reducescatter and grouped_reducescatter in all their forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import HorovodInternalError
from ..agreement.call import Kind
from ..agreement.connections import Verdict
from ..backends.base import Group
from ..compiling import not_compiled
from ..types import REDUCE_OP_NAMES, Average, Op, Sum
from ..world import ProcessSetLike, channel_of, global_process_set
from .allgather import allgather_gradient, plan_allgather
from .plan import Plan, check_rows, check_tensors, make_call, planned
from .reduction import Compression, Compressor, Reduction, check_reducible, compressed, reduce_tensors, scale_

REDUCESCATTER = Kind("reducescatter", "REDUCESCATTER")
GROUPED_REDUCESCATTER = Kind("grouped_reducescatter", "REDUCESCATTER")


@planned(REDUCESCATTER)
def plan_reducescatter(
    tensors: Sequence[torch.Tensor],
    reduction: Reduction,
    name: str | None,
    *,
    compression: type[Compressor] | Compressor = Compression.none,
    grouped: bool = False,
    process_set: ProcessSetLike,
) -> Plan[tuple[torch.Tensor, ...]]:
    """Return the plan of a reducescatter. Its result: for each of `tensors`, this rank's rows of the reduced tensor."""
    channel, reduction = channel_of(process_set), reduction.checked()
    sent, restore = check_tensors(tensors, grouped=grouped), None
    if compression is not Compression.none:
        sent, restore = compressed(sent, compression)
    for tensor in sent:
        check_reducible(tensor.dtype, Sum)
        check_rows(tensor)
    if reduction.op not in (Sum, Average):
        # The same class of error as in Horovod (horovod/common/operations.cc:1819).
        raise HorovodInternalError(
            f"`op` must be Sum or Average for reducescatter, but is {REDUCE_OP_NAMES[reduction.op]} instead."
        )
    reduction.check(sent, channel.group.size)
    kind = GROUPED_REDUCESCATTER if grouped else REDUCESCATTER
    call = make_call(kind, name, **reduction.describe(sent))

    def execute(group: Group, verdict: Verdict) -> tuple[torch.Tensor, ...]:
        whole = [tensor.detach().clone() for tensor in sent]
        reduce_tensors(group, whole, reduction)
        # As in Horovod 0.28.1, each of the first ranks gets one more row if they do not divide
        # (horovod/common/ops/collective_operations.cc:314, ReducescatterOp::ComputeOutputShapeForRank).
        return tuple(tensor.tensor_split(group.size)[group.rank].clone() for tensor in whole)

    return Plan(process_set, channel, call, execute, sent, restore)


@not_compiled
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: Op = Average,
    process_set: ProcessSetLike = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    gradient: int = Average,
) -> torch.Tensor:
    """Reduce `tensor` over the ranks and return this rank's share of its rows; differentiable.

    Collective: every member of `process_set` must call it.

    Args:
        tensor: (n, ...), equal shape on all ranks; dtypes as for `allreduce`.
        op: Average (default) or Sum. The other arguments are those of `allreduce`, in Horovod's order.
        gradient: Sum for the mathematical gradient of the sum of all ranks' losses; Average (Horovod's, the
            default) for that times the number of ranks.

    Returns:
        (n // size, ...), with one more row on each of the first n % size ranks.

    Raises ValueError and HorovodInternalError as `allreduce` does, the latter also for another `op`.
    """
    reduction = Reduction(op, prescale_factor, postscale_factor)
    plan = plan_reducescatter([tensor], reduction, name, compression=compression, process_set=process_set)
    return plan.run(reducescatter_gradient, gradient)[0]


@not_compiled
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSetLike = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `reducescatter` and return a handle; `synchronize` returns the new tensor. Not differentiable.

    Collective like `reducescatter`, with the same arguments, shapes and errors.
    """
    reduction = Reduction(op, prescale_factor, postscale_factor)
    plan = plan_reducescatter([tensor], reduction, name, process_set=process_set)
    return plan.submit(lambda outputs: outputs[0])


@not_compiled
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: Op = Average,
    process_set: ProcessSetLike = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    gradient: int = Average,
) -> list[torch.Tensor]:
    """Return `reducescatter` of each of `tensors`, as one operation; differentiable.

    Collective like `reducescatter`, with the same arguments, shapes and errors. Tensors may differ in shape and dtype.
    """
    reduction = Reduction(op, prescale_factor, postscale_factor)
    plan = plan_reducescatter(tensors, reduction, name, compression=compression, grouped=True, process_set=process_set)
    return list(plan.run(reducescatter_gradient, gradient))


@not_compiled
def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSetLike = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `grouped_reducescatter` and return a handle; `synchronize` returns the tuple of new tensors.

    Collective like `reducescatter`, with the same arguments, shapes and errors. Not differentiable.
    """
    reduction = Reduction(op, prescale_factor, postscale_factor)
    return plan_reducescatter(tensors, reduction, name, grouped=True, process_set=process_set).submit()


def reducescatter_gradient(ran: Any, *grads: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the gradients of reducescatter and grouped_reducescatter.

    The gradients of all ranks, gathered, times the number of ranks for Sum (horovod/torch/mpi_ops.py:1070). That is the
    gradient of the sum of all ranks' losses, times the number of ranks.
    """
    reduction, size = Reduction.of(ran.call), channel_of(ran.process_set).group.size
    factor = reduction.prescale_factor * reduction.postscale_factor
    if reduction.op == Sum:
        factor *= size
    if ran.gradient == Sum:
        factor /= size
    plans = [plan_allgather([grad], process_set=ran.process_set) for grad in grads]
    gathered = [plan.run(allgather_gradient, ran.gradient)[0] for plan in plans]
    for rows in gathered:
        scale_(rows, factor)
    return gathered
