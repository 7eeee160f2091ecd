"""The gradients of the collectives.

A class per collective. `record` runs a plan, and records its gradient if autograd is active. A backward pass runs the
plan of another collective in the same way, so that gradients can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from ..checks import wrong
from ..compiling import not_compiled
from ..types import Average, Max, Min, Product, Sum
from ..world.process_sets import ProcessSet, reporting
from .plans.allgather import plan_allgather
from .plans.allreduce import plan_allreduce
from .plans.alltoall import plan_alltoall
from .plans.arguments import ReductionArguments
from .plans.broadcast import plan_broadcast
from .plans.gather import plan_gather
from .plans.plan import Plan
from .plans.scatter import plan_scatter
from .reduction import Reduction, scale_

__all__ = (
    "Allgather",
    "Allreduce",
    "Alltoall",
    "Broadcast",
    "Gather",
    "Reduce",
    "Reducescatter",
    "Scatter",
    "record",
)

T = TypeVar("T")
Tensors = tuple[torch.Tensor, ...]


def record(
    function: type[torch.autograd.Function],
    plan: Plan[T],
    tensors: Sequence[torch.Tensor],
    process_set: ProcessSet,
    *gradient: int,
) -> T:
    """Run `plan`, a collective of `tensors`, and return its result; record `function` if autograd is active.

    gradient: for a `function` that takes it: Average, Horovod's gradient, or Sum, that of the sum of all ranks' losses.
    """
    for chosen in gradient:
        if type(chosen) is not int or chosen not in (Average, Sum):
            with reporting(plan.call.kind, process_set):
                fix = "Pass hvd.Sum for the gradient of the sum of all ranks' losses."
                raise wrong("gradient", "hvd.Average or hvd.Sum", chosen, fix)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return plan.run()
    result: T = function.apply(plan, process_set, *gradient, *tensors)
    return result


@not_compiled
class Allreduce(torch.autograd.Function):
    """The gradient of allreduce and grouped_allreduce.

    Sum, Average and Adasum: the same reduction of the gradients (horovod/torch/mpi_ops.py:194). Min and Max: the sum
    of the gradients, on the ranks that have the extreme value; several such ranks share it equally. Product: the sum of
    the gradients, times the product of the other ranks' values.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan[Tensors], process_set: ProcessSet, *tensors: torch.Tensor) -> Tensors:
        outputs = plan.run()
        ctx.reduction, ctx.process_set = Reduction.of(plan.call), process_set
        if ctx.reduction.op in (Min, Max, Product):
            ctx.save_for_backward(*tensors)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        reduction, process_set = ctx.reduction, ctx.process_set
        if reduction.op not in (Min, Max, Product):
            arguments = ReductionArguments(
                reduction.op, reduction.prescale_factor, reduction.postscale_factor
            )
            plan = plan_allreduce(grads, arguments, grouped=len(grads) > 1, process_set=process_set)
            return None, None, *record(Allreduce, plan, grads, process_set)
        factor = reduction.prescale_factor * reduction.postscale_factor
        arguments = ReductionArguments(Sum, postscale_factor=factor)
        plan = plan_allreduce(grads, arguments, grouped=len(grads) > 1, process_set=process_set)
        totals = plan.run()
        share = _product_of_others if reduction.op == Product else _share_of_extreme
        shares = [
            share(tensor.detach() * reduction.prescale_factor, reduction.op, process_set)
            for tensor in ctx.saved_tensors
        ]
        return None, None, *(total * part for total, part in zip(totals, shares, strict=True))


def _share_of_extreme(tensor: torch.Tensor, op: int, process_set: ProcessSet) -> torch.Tensor:
    (extreme,) = plan_allreduce([tensor], ReductionArguments(op), process_set=process_set).run()
    mine = (tensor == extreme).to(tensor.dtype)
    (holders,) = plan_allreduce([mine], ReductionArguments(Sum), process_set=process_set).run()
    return mine / holders


def _product_of_others(tensor: torch.Tensor, op: int, process_set: ProcessSet) -> torch.Tensor:
    (everyone,) = plan_allgather([tensor.unsqueeze(0)], process_set=process_set).run()
    others = [row for index, row in enumerate(everyone) if index != process_set.rank()]
    return torch.stack([*others, torch.ones_like(tensor)]).prod(dim=0)


@not_compiled
class Allgather(torch.autograd.Function):
    """The gradient of allgather and grouped_allgather.

    This rank's rows of the average of all ranks' gradients (horovod/torch/mpi_ops.py:630), or of their sum.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: Plan[Tensors], process_set: ProcessSet, gradient: int, *tensors: torch.Tensor
    ) -> Tensors:
        ctx.process_set, ctx.gradient = process_set, gradient
        ctx.shapes = [tensor.shape for tensor in tensors]
        return plan.run()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        process_set = ctx.process_set
        rows = torch.tensor([shape[0] if shape else 1 for shape in ctx.shapes])
        (table,) = plan_allgather([rows.unsqueeze(0)], process_set=process_set).run()
        starts = table[: process_set.rank()].sum(dim=0).tolist()
        plan = plan_allreduce(grads, ReductionArguments(ctx.gradient), grouped=True, process_set=process_set)
        totals = record(Allreduce, plan, grads, process_set)
        own = [
            total.narrow(0, start, count).reshape(shape)
            for total, start, count, shape in zip(totals, starts, rows.tolist(), ctx.shapes, strict=True)
        ]
        return None, None, None, *own


@not_compiled
class Gather(torch.autograd.Function):
    """The gradient of gather: each rank gets its own rows of the root's gradient."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan[tuple[torch.Tensor, torch.Tensor]], process_set: ProcessSet, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, counts = plan.run()
        ctx.root_rank, ctx.process_set, ctx.shape = _root_of(plan), process_set, tensor.shape
        ctx.counts = counts.tolist()
        ctx.mark_non_differentiable(counts)
        return rows, counts

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        plan = plan_scatter(grad, ctx.root_rank, ctx.counts, process_set=ctx.process_set)
        return None, None, record(Scatter, plan, [grad], ctx.process_set).reshape(ctx.shape)


@not_compiled
class Alltoall(torch.autograd.Function):
    """The gradient of alltoall: each row goes back to its rank (horovod/torch/mpi_ops.py:960)."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan[tuple[torch.Tensor, torch.Tensor]], process_set: ProcessSet, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, counts = plan.run()
        ctx.process_set, ctx.counts, ctx.num_rows = process_set, counts.tolist(), tensor.shape[0]
        ctx.mark_non_differentiable(counts)
        return rows, counts

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        plan = plan_alltoall(grad, ctx.counts, process_set=ctx.process_set)
        back, _ = record(Alltoall, plan, [grad], ctx.process_set)
        if len(back) < ctx.num_rows:  # Rows beyond the splits were not sent.
            back = torch.cat([back, back.new_zeros(ctx.num_rows - len(back), *back.shape[1:])])
        return None, None, back


@not_compiled
class Scatter(torch.autograd.Function):
    """The gradient of scatter: the root gets the gradients of all ranks, the other ranks get zeros."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan[torch.Tensor], process_set: ProcessSet, tensor: torch.Tensor
    ) -> torch.Tensor:
        ctx.root_rank, ctx.process_set, ctx.shape = _root_of(plan), process_set, tensor.shape
        return plan.run()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        plan = plan_gather(grad, ctx.root_rank, process_set=ctx.process_set)
        rows, _ = record(Gather, plan, [grad], ctx.process_set)
        back = grad.new_zeros(ctx.shape)
        back[: len(rows)] = rows
        return None, None, back


@not_compiled
class Broadcast(torch.autograd.Function):
    """The gradient of broadcast.

    The average over the ranks on the root, else 0 (horovod/torch/mpi_ops.py:813), or the sum in place of the average.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: Plan[torch.Tensor], process_set: ProcessSet, gradient: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        ctx.root_rank, ctx.process_set, ctx.gradient = _root_of(plan), process_set, gradient
        return plan.run()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        process_set = ctx.process_set
        plan = plan_allreduce([grad], ReductionArguments(ctx.gradient), process_set=process_set)
        (total,) = record(Allreduce, plan, [grad], process_set)
        is_root = process_set.ranks[process_set.rank()] == ctx.root_rank
        return None, None, None, total if is_root else torch.zeros_like(total)


@not_compiled
class Reducescatter(torch.autograd.Function):
    """The gradient of reducescatter and grouped_reducescatter.

    The gradients of all ranks, gathered, times the number of ranks for Sum (horovod/torch/mpi_ops.py:1070). That is the
    gradient of the sum of all ranks' losses, times the number of ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: Plan[Tensors], process_set: ProcessSet, gradient: int, *tensors: torch.Tensor
    ) -> Tensors:
        ctx.reduction, ctx.process_set, ctx.gradient = Reduction.of(plan.call), process_set, gradient
        return plan.run()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        reduction, process_set = ctx.reduction, ctx.process_set
        factor = reduction.prescale_factor * reduction.postscale_factor
        if reduction.op == Sum:
            factor *= process_set.size()
        if ctx.gradient == Sum:
            factor /= process_set.size()
        gathered = []
        for grad in grads:
            plan = plan_allgather([grad], process_set=process_set)
            (rows,) = record(Allgather, plan, [grad], process_set, ctx.gradient)
            scale_(rows, factor)
            gathered.append(rows)
        return None, None, None, *gathered


@not_compiled
class Reduce(torch.autograd.Function):
    """The gradient of reduce for Sum and Average: the root's gradient on every rank, scaled like the values."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan[torch.Tensor], process_set: ProcessSet, tensor: torch.Tensor
    ) -> torch.Tensor:
        ctx.reduction, ctx.root_rank, ctx.process_set = Reduction.of(plan.call), _root_of(plan), process_set
        if ctx.reduction.op not in (Sum, Average):
            raise NotImplementedError(
                "`reduce` is differentiable for Sum and Average. Use allreduce for other ops."
            )
        return plan.run()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        reduction, process_set = ctx.reduction, ctx.process_set
        plan = plan_broadcast(grad, ctx.root_rank, process_set=process_set)
        back = record(Broadcast, plan, [grad], process_set, Sum)
        divisor = process_set.size() if reduction.op == Average else 1
        scale_(back, reduction.prescale_factor * reduction.postscale_factor / divisor)
        return None, None, back


def _root_of(plan: Plan[Any]) -> int:
    root_rank: int = dict(plan.call.arguments)["root_rank"]
    return root_rank
