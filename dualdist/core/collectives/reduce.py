"""reduce: an allreduce whose result only the root gets. The arithmetic of all reductions is in reduction.py."""

from __future__ import annotations

from typing import Any

import torch

from ..agreement.call import Kind
from ..agreement.matching import Verdict
from ..backends.base import Group
from ..compiling import not_compiled
from ..types import Average, Op, Sum
from ..world.process_sets import ProcessSetLike, channel_of, global_process_set, reporting
from .broadcast import Broadcast, plan_broadcast
from .plan import Plan, channel_and_root, check_tensor, make_call, root_of
from .reduction import Reduction, reduce_tensors, scale_

REDUCE = Kind("reduce", "REDUCE")


@not_compiled
def reduce(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    op: Op = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSetLike = global_process_set,
) -> torch.Tensor:
    """Return `tensor` reduced over the ranks on rank `root_rank`, zeros elsewhere; differentiable (Sum, Average).

    Collective: every member of `process_set` must call it.

    Args:
        tensor: any shape, equal on all ranks; dtypes as for `allreduce`.
        root_rank: a global rank, equal on all ranks.
        op: Average (default), where torch.distributed.reduce sums. The other arguments are those of `allreduce`.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises ValueError and HorovodInternalError as `allreduce` does, and NotImplementedError if autograd is active and
    `op` is neither Sum nor Average.
    """
    with reporting(REDUCE, process_set):
        channel, root_rank, root = channel_and_root(process_set, root_rank)
        reduction = Reduction(op, prescale_factor, postscale_factor).checked()
        check_tensor(tensor)
        reduction.check([tensor], channel.group.size)
        call = make_call(REDUCE, name, root_rank=root_rank, **reduction.describe([tensor]))

        def execute(group: Group, verdict: Verdict) -> torch.Tensor:
            output = tensor.detach().clone()
            reduce_tensors(group, [output], reduction)
            return output if group.rank == root else torch.zeros_like(output)

        plan = Plan(process_set, channel, call, execute, [tensor])
    return plan.run(Reduce)


@not_compiled
class Reduce(torch.autograd.Function):
    """The gradient of reduce for Sum and Average: the root's gradient on every rank, scaled like the values."""

    @staticmethod
    def forward(ctx: Any, plan: Plan[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
        ctx.reduction, ctx.root_rank = Reduction.of(plan.call), root_of(plan)
        ctx.process_set = plan.process_set
        if ctx.reduction.op not in (Sum, Average):
            raise NotImplementedError(
                "`reduce` is differentiable for Sum and Average. Use allreduce for other ops."
            )
        return plan.run()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        reduction, process_set = ctx.reduction, ctx.process_set
        plan = plan_broadcast(grad, ctx.root_rank, process_set=process_set)
        back = plan.run(Broadcast, Sum)
        divisor = channel_of(process_set).group.size if reduction.op == Average else 1
        scale_(back, reduction.prescale_factor * reduction.postscale_factor / divisor)
        return None, back
