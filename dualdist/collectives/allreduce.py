"""allreduce and grouped_allreduce in all their forms, and the reduction of sparse tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..agreement import kinds
from ..agreement.call_site import warn_deprecated
from ..agreement.channel import Execute
from ..agreement.verdict import Verdict
from ..backends.base import Group
from ..types import REDUCE_OP_NAMES, Adasum, Average, Max, Min, Product, Sum
from ..world.context import current
from ..world.process_sets import ProcessSet, channel_of, global_process_set
from .adasum import check_adasum_size
from .compression import Compression, Compressor
from .gather import allgather, allgather_async
from .plan import Plan, check_tensor, differentiable, make_call, planned
from .reduce import Reduction, payload_of, reduce_payloads, reduce_tensors
from .wire import check_reducible

__all__ = (
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "sparse_allreduce_async",
)


Asked = tuple[int | None, bool | None, float, float]
"""op, average, prescale_factor and postscale_factor as the user gave them."""


def reduction_of(
    op: int | None, average: bool | None, prescale_factor: float, postscale_factor: float
) -> Reduction:
    """Return the Reduction that was asked for (horovod/common/util.py, get_average_backwards_compatibility_fun)."""
    if op is not None and average is not None:
        raise ValueError("`average` must not be given beside `op`: use `op` alone.")
    if average is not None:
        warn_deprecated("`average` is deprecated; use `op` instead.")
        op = Average if average else Sum
    return Reduction(Average if op is None else op, float(prescale_factor), float(postscale_factor))


def check_reduction(tensors: Sequence[torch.Tensor], reduction: Reduction, process_set: ProcessSet) -> None:
    """Raise ValueError, TypeError or NotImplementedError unless `tensors` can be reduced so."""
    for tensor in tensors:
        check_tensor(tensor)
        check_reducible(tensor.dtype, reduction.op)
    if len({tensor.device for tensor in tensors}) > 1:
        raise ValueError(
            f"`tensors` must be on one device, but are on {sorted({str(t.device) for t in tensors})} instead."
        )
    if reduction.op == Adasum:
        check_adasum_size(channel_of(process_set).group.size)


def reduction_arguments(tensors: Sequence[torch.Tensor], reduction: Reduction) -> dict[str, Any]:
    """Return what must be equal on all ranks, in the order in which errors name it."""
    return {
        "shapes": tuple(tuple(tensor.shape) for tensor in tensors),
        "dtypes": tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
        "op": REDUCE_OP_NAMES[reduction.op],
        "prescale_factor": reduction.prescale_factor,
        "postscale_factor": reduction.postscale_factor,
        "device": tensors[0].device.type,
    }


@planned(kinds.ALLREDUCE)
def plan_allreduce(
    tensors: Sequence[torch.Tensor],
    asked: Asked,
    name: str | None,
    in_place: bool,
    grouped: bool,
    *,
    process_set: ProcessSet,
) -> Plan[list[torch.Tensor]]:
    """Return the plan of an allreduce. Its result: `tensors` themselves, or new tensors of the same shapes."""
    channel, reduction = channel_of(process_set), reduction_of(*asked)
    if not tensors:
        raise ValueError("`tensors` must hold at least one tensor, but is empty instead.")
    check_reduction(tensors, reduction, process_set)
    kind = kinds.GROUPED_ALLREDUCE if grouped else kinds.ALLREDUCE
    payload = payload_of(channel.group, tensors, reduction)
    call = make_call(kind, name, payload=payload, **reduction_arguments(tensors, reduction))
    return Plan(channel, call, _executor(tensors, reduction, in_place))


def _executor(
    tensors: Sequence[torch.Tensor], reduction: Reduction, in_place: bool
) -> Execute[list[torch.Tensor]]:
    def execute(group: Group, verdict: Verdict) -> list[torch.Tensor]:
        outputs = list(tensors) if in_place else [tensor.detach().clone() for tensor in tensors]
        if any(verdict.payloads):
            reduce_payloads(group, verdict.payloads, outputs, reduction)
        else:
            reduce_tensors(group, outputs, reduction)
        return outputs

    return execute


class _Allreduce(torch.autograd.Function):
    """The gradient of allreduce, one or several tensors.

    Sum, Average and Adasum: the same reduction of the gradients (mpi_ops.py, HorovodAllreduce). Min and Max: the sum
    of the gradients goes to the ranks that hold the result, shared among ties. Product: times the others' product.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan[list[torch.Tensor]], process_set: ProcessSet, *tensors: Any) -> Any:
        outputs = plan.run()
        ctx.reduction, ctx.process_set = Reduction.of(plan.call), process_set
        if ctx.reduction.op in (Min, Max, Product):
            ctx.save_for_backward(*tensors, *outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        reduction, process_set = ctx.reduction, ctx.process_set
        factor = reduction.prescale_factor * reduction.postscale_factor
        by_share = reduction.op in (Min, Max, Product)
        asked: Asked = (reduction.op, None, reduction.prescale_factor, reduction.postscale_factor)
        if by_share:
            asked = (Sum, None, 1.0, factor)
        total = plan_allreduce(grads, asked, None, False, len(grads) > 1, process_set=process_set).run()
        if not by_share:
            return None, None, *total
        count = len(grads)
        saved = ctx.saved_tensors
        share = _product_of_others if reduction.op == Product else _share_of_extreme
        shares = [
            share(tensor, output, reduction, process_set)
            for tensor, output in zip(saved[:count], saved[count:], strict=True)
        ]
        return None, None, *(grad * part for grad, part in zip(total, shares, strict=True))


def _share_of_extreme(
    tensor: torch.Tensor, output: torch.Tensor, reduction: Reduction, process_set: ProcessSet
) -> torch.Tensor:
    scaled = tensor * reduction.prescale_factor
    extreme = allreduce(scaled.detach(), op=reduction.op, process_set=process_set)
    mine = (scaled == extreme).to(tensor.dtype)
    return mine / allreduce(mine, op=Sum, process_set=process_set)


def _product_of_others(
    tensor: torch.Tensor, output: torch.Tensor, reduction: Reduction, process_set: ProcessSet
) -> torch.Tensor:
    everyone = allgather((tensor * reduction.prescale_factor).detach().unsqueeze(0), process_set=process_set)
    others = [row for place, row in enumerate(everyone) if place != process_set.rank()]
    return torch.stack([*others, torch.ones_like(tensor)]).prod(dim=0)


def _run(
    tensors: Sequence[torch.Tensor], asked: Asked, name: str | None, grouped: bool, process_set: ProcessSet
) -> list[torch.Tensor]:
    plan = plan_allreduce(tensors, asked, name, False, grouped, process_set=process_set)
    if not differentiable(tensors):
        return plan.run()
    return list(_Allreduce.apply(plan, process_set, *tensors))


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return `tensor` reduced over the ranks; differentiable.

    Collective: every member of `process_set` must call it, in the same order.

    Args:
        tensor: any shape, equal on all ranks; floating-point, integer, bool (Sum, Min, Max, Product) or complex
            (Sum, Average); on the CPU or a GPU, alike on all ranks; any memory layout.
        average: deprecated, use `op`.
        name: must be equal on all ranks; shown in errors and on the timeline.
        compression: `Compression.fp16` or `bf16` to send fewer bytes.
        op: Average (default), Sum, Min, Max, Product or Adasum.
        prescale_factor, postscale_factor: multiply before and after the reduction.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises:
        ValueError: an argument is wrong on this rank (dtype, op, name in use, not a member).
        HorovodInternalError: the ranks called different things, a rank never came, or the backend failed.
    """
    compressed, ctx = compression.compress(tensor)
    reduced = _run([compressed], (op, average, prescale_factor, postscale_factor), name, False, process_set)
    return compression.decompress(reduced[0], ctx)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `allreduce` and return a handle at once; `synchronize` gives the new tensor. Not differentiable.

    `tensor` must not change until then. Otherwise as `allreduce`.
    """
    plan = plan_allreduce(
        [tensor],
        (op, average, prescale_factor, postscale_factor),
        name,
        False,
        False,
        process_set=process_set,
    )
    return plan.then(_only).submit()


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce `tensor` in place over the ranks and return it. Not differentiable. Otherwise as `allreduce`."""
    plan = plan_allreduce(
        [tensor],
        (op, average, prescale_factor, postscale_factor),
        name,
        True,
        False,
        process_set=process_set,
    )
    return plan.run()[0]


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `allreduce_` and return a handle at once; `synchronize` gives `tensor` itself."""
    plan = plan_allreduce(
        [tensor],
        (op, average, prescale_factor, postscale_factor),
        name,
        True,
        False,
        process_set=process_set,
    )
    return plan.then(_only).submit()


def _only(outputs: list[torch.Tensor]) -> torch.Tensor:
    return outputs[0]


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return `tensors` reduced over the ranks, as one operation; differentiable.

    The tensors may differ in shape and dtype but not in device. Otherwise as `allreduce`.
    """
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = _run(
        [sent for sent, _ in pairs],
        (op, average, prescale_factor, postscale_factor),
        name,
        True,
        process_set,
    )
    return [compression.decompress(output, ctx) for output, (_, ctx) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allreduce` and return a handle at once; `synchronize` gives the tuple of new tensors."""
    return (
        plan_allreduce(
            list(tensors),
            (op, average, prescale_factor, postscale_factor),
            name,
            False,
            True,
            process_set=process_set,
        )
        .then(tuple)
        .submit()
    )


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduce `tensors` in place, as one operation, and return them as a tuple (as Horovod does)."""
    return tuple(
        plan_allreduce(
            list(tensors),
            (op, average, prescale_factor, postscale_factor),
            name,
            True,
            True,
            process_set=process_set,
        ).run()
    )


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allreduce_` and return a handle at once; `synchronize` gives the tuple of tensors."""
    return (
        plan_allreduce(
            list(tensors),
            (op, average, prescale_factor, postscale_factor),
            name,
            True,
            True,
            process_set=process_set,
        )
        .then(tuple)
        .submit()
    )


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start reducing a sparse COO tensor and return a function that waits and gives the new sparse tensor.

    Indices and values of all ranks are gathered (mpi_ops.py:567); Average divides the values. op: Sum or Average.
    Otherwise as `allreduce`.
    """
    if op not in (Sum, Average):
        raise ValueError(f"`op` must be Sum or Average for sparse tensors, but is {op!r} instead.")
    coalesced = tensor.coalesce() if not tensor.is_coalesced() else tensor
    named = None if name is None else f"{name}.{{}}"
    indices = allgather_async(
        coalesced.indices().t().contiguous(), name=named and named.format("indices"), process_set=process_set
    )
    values = allgather_async(
        coalesced.values(), name=named and named.format("values"), process_set=process_set
    )
    handles, size = current().handles, channel_of(process_set).group.size

    def wait() -> torch.Tensor:
        all_indices, all_values = handles.synchronize(indices), handles.synchronize(values)
        if op == Average:
            all_values = all_values / size
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape, check_invariants=False)

    return wait
