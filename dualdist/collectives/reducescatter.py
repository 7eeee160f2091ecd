"""reducescatter and grouped_reducescatter in all their forms."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..agreement import call_kinds
from ..types import Average, Op
from ..world.process_sets import ProcessSet, global_process_set
from .autograd import Reducescatter, record
from .compression import Compression, Compressor, compressed
from .plans.arguments import ReductionArguments
from .plans.reducescatter import plan_reducescatter

__all__ = (
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
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
        gradient: Average (default), as in Horovod, for the gradient of the sum of all ranks' losses times their number;
            Sum for that gradient itself.

    Returns:
        (n // size, ...), with one more row on each of the first n % size ranks.

    Raises:
        ValueError: an argument is wrong on this rank.
        HorovodInternalError: `op` is neither Average nor Sum, or as for `allreduce`.
    """
    sent, (ctx,) = compressed([tensor], compression, call_kinds.REDUCESCATTER, process_set)
    arguments = ReductionArguments(op, prescale_factor, postscale_factor)
    plan = plan_reducescatter(sent, arguments, name, process_set=process_set)
    (output,) = record(Reducescatter, plan, sent, process_set, gradient)
    return compression.decompress(output, ctx)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `reducescatter` and return a handle; `synchronize` returns the new tensor. Not differentiable."""
    arguments = ReductionArguments(op, prescale_factor, postscale_factor)
    plan = plan_reducescatter([tensor], arguments, name, process_set=process_set)
    return plan.then(lambda outputs: outputs[0]).submit()


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    gradient: int = Average,
) -> list[torch.Tensor]:
    """Return `reducescatter` of each of `tensors`, as one operation; differentiable."""
    sent, contexts = compressed(
        tensors, compression, call_kinds.GROUPED_REDUCESCATTER, process_set, grouped=True
    )
    arguments = ReductionArguments(op, prescale_factor, postscale_factor)
    plan = plan_reducescatter(sent, arguments, name, grouped=True, process_set=process_set)
    outputs = record(Reducescatter, plan, sent, process_set, gradient)
    return [compression.decompress(output, ctx) for output, ctx in zip(outputs, contexts, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `grouped_reducescatter` and return a handle; `synchronize` returns the tuple of new tensors."""
    arguments = ReductionArguments(op, prescale_factor, postscale_factor)
    return plan_reducescatter(tensors, arguments, name, grouped=True, process_set=process_set).submit()
