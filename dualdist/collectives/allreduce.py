"""allreduce and grouped_allreduce in all their forms."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..agreement import call_kinds
from ..types import Op
from ..world.process_sets import ProcessSet, global_process_set
from .autograd import Allreduce, record
from .compression import Compression, Compressor, compressed
from .plans.allreduce import plan_allreduce
from .plans.arguments import ReductionArguments

__all__ = (
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return `tensor` reduced over the ranks; differentiable.

    Collective: every member of `process_set` must call it.

    Args:
        tensor: any shape, equal on all ranks; floating-point, integer, bool (Sum, Min, Max, Product) or complex
            (Sum, Average); on the CPU of all ranks or on a GPU of all ranks; any memory layout.
        average: deprecated, use `op`.
        name: matches the calls of the ranks, in any order. Calls without one match by their order among those of the
            same kind.
        compression: `Compression.fp16` or `bf16` to send fewer bytes.
        op: Average (default), Sum, Min, Max, Product or Adasum; or SUM, AVG, MIN, MAX or PRODUCT of
            torch.distributed.ReduceOp.
        prescale_factor, postscale_factor: factors before and after the reduction.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises:
        ValueError: an argument is wrong on this rank (dtype, op, name in use, not a member).
        HorovodInternalError: the ranks' calls differ, a rank did not call in time, or the backend failed.
    """
    sent, (ctx,) = compressed([tensor], compression, call_kinds.ALLREDUCE, process_set)
    arguments = ReductionArguments(op, prescale_factor, postscale_factor, average)
    plan = plan_allreduce(sent, arguments, name, process_set=process_set)
    (reduced,) = record(Allreduce, plan, sent, process_set)
    return compression.decompress(reduced, ctx)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `allreduce` and return a handle; `synchronize` returns the new tensor. Not differentiable.

    `tensor` must not change until then. Otherwise as `allreduce`.
    """
    arguments = ReductionArguments(op, prescale_factor, postscale_factor, average)
    plan = plan_allreduce([tensor], arguments, name, process_set=process_set)
    return plan.then(_only).submit()


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce `tensor` in place over the ranks and return it. Not differentiable. Otherwise as `allreduce`."""
    arguments = ReductionArguments(op, prescale_factor, postscale_factor, average)
    return _only(plan_allreduce([tensor], arguments, name, in_place=True, process_set=process_set).run())


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `allreduce_` and return a handle; `synchronize` returns `tensor` itself."""
    arguments = ReductionArguments(op, prescale_factor, postscale_factor, average)
    plan = plan_allreduce([tensor], arguments, name, in_place=True, process_set=process_set)
    return plan.then(_only).submit()


def _only(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    (output,) = outputs
    return output


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return `tensors` reduced over the ranks, as one operation; differentiable.

    The tensors may differ in shape and dtype but not in device. Otherwise as `allreduce`.
    """
    sent, contexts = compressed(tensors, compression, call_kinds.GROUPED_ALLREDUCE, process_set, grouped=True)
    arguments = ReductionArguments(op, prescale_factor, postscale_factor, average)
    plan = plan_allreduce(sent, arguments, name, grouped=True, process_set=process_set)
    reduced = record(Allreduce, plan, sent, process_set)
    return [compression.decompress(output, ctx) for output, ctx in zip(reduced, contexts, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allreduce` and return a handle; `synchronize` returns the tuple of new tensors."""
    arguments = ReductionArguments(op, prescale_factor, postscale_factor, average)
    return plan_allreduce(tensors, arguments, name, grouped=True, process_set=process_set).submit()


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduce `tensors` in place, as one operation, and return them as a tuple (as Horovod does)."""
    arguments = ReductionArguments(op, prescale_factor, postscale_factor, average)
    plan = plan_allreduce(tensors, arguments, name, in_place=True, grouped=True, process_set=process_set)
    return plan.run()


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allreduce_` and return a handle; `synchronize` returns the tuple of `tensors`."""
    arguments = ReductionArguments(op, prescale_factor, postscale_factor, average)
    plan = plan_allreduce(tensors, arguments, name, in_place=True, grouped=True, process_set=process_set)
    return plan.submit()
