"""alltoall in all its forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..agreement.call import Kind
from ..agreement.connections import Verdict
from ..backends.base import Group
from ..checks import integer, items
from ..compiling import not_compiled
from ..world import ProcessSetLike, channel_of, global_process_set
from .plan import Plan, check_rows, make_call, planned
from .wire import alltoall_rows, dtype_name


def check_splits(tensor: torch.Tensor, splits: Any, size: int) -> list[int]:
    """Return the number of rows for each rank. Raises ValueError unless `splits` fits `size` and `tensor`."""
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(
                f"`tensor` must have rows that divide by {size} ranks, but has {rows} instead. Give `splits`."
            )
        return [rows // size] * size
    if isinstance(splits, torch.Tensor):
        if splits.dtype is not torch.int32 or splits.dim() != 1:
            raise ValueError(f"`splits` must be a 1-D int32 tensor, but is {splits.dim()}-D {splits.dtype} instead.")
        splits = splits.tolist()
    given = items("splits", splits, "a list of whole numbers", "Give the number of rows for each rank.")
    counts = [integer(f"splits[{place}]", count) for place, count in enumerate(given)]
    if len(counts) != size or min(counts) < 0 or sum(counts) > rows:
        raise ValueError(
            f"`splits` must be {size} numbers of at least 0 with a sum of at most {rows} rows, but is "
            f"{counts} instead. Give the number of rows for each rank."
        )
    return counts


def describe_rows(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the arguments for the Call of a collective that moves rows of `tensor`, (n, ...)."""
    return {"trailing_shape": tuple(tensor.shape[1:]), "dtype": dtype_name(tensor.dtype), "device": tensor.device.type}


ALLTOALL = Kind("alltoall", "ALLTOALL")


@planned(ALLTOALL)
def plan_alltoall(
    tensor: torch.Tensor, splits: Any, name: str | None = None, *, process_set: ProcessSetLike
) -> Plan[tuple[torch.Tensor, list[int]]]:
    """Return the plan of an alltoall. Its result: the received rows, and their number from each rank."""
    channel = channel_of(process_set)
    check_rows(tensor)
    counts = check_splits(tensor, splits, channel.group.size)
    call = make_call(ALLTOALL, name, count=sum(counts), **describe_rows(tensor))

    def execute(group: Group, verdict: Verdict) -> tuple[torch.Tensor, list[int]]:
        return alltoall_rows(group, tensor, counts, verdict.counts)

    return Plan(process_set, channel, call, execute, [tensor])


@not_compiled
def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send rows of `tensor` to every rank and return the rows from all ranks, in rank order; differentiable.

    Collective: every member of `process_set` must call it.

    Args:
        tensor: (n, ...), any dtype.
        splits: the number of rows for each rank, a list or a 1-D int32 tensor; rows beyond their sum are not sent.
            None: the same number for each; n must then be divisible by the number of ranks.
        name: as for `allreduce`.

    Returns:
        (m, ...), same dtype and device. With `splits` also the number of rows from each rank, (size,) int32.

    Raises ValueError and HorovodInternalError as `allreduce` does.
    """
    plan = plan_alltoall(tensor, splits, name, process_set=process_set)
    rows, counts = plan.run(alltoall_gradient)
    return rows if splits is None else (rows, _on_device_of(splits, counts))


@not_compiled
def alltoall_async(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> int:
    """Start an `alltoall` and return a handle; `synchronize` always returns (rows, number of rows from each rank).

    Collective like `alltoall`, with the same arguments, shapes and errors. Not differentiable.
    """
    plan = plan_alltoall(tensor, splits, name, process_set=process_set)
    return plan.submit(lambda result: (result[0], _on_device_of(splits, result[1])))


def _on_device_of(splits: Any, counts: Sequence[int]) -> torch.Tensor:
    device = splits.device if isinstance(splits, torch.Tensor) else "cpu"
    return torch.tensor(counts, dtype=torch.int32, device=device)


def alltoall_gradient(ran: Any, grad: torch.Tensor, _: Any) -> Sequence[torch.Tensor]:
    """Return the gradient of alltoall: each row goes back to its rank (horovod/torch/mpi_ops.py:960)."""
    plan = plan_alltoall(grad, ran.numbers, process_set=ran.process_set)
    back, _ = plan.run(alltoall_gradient)
    rows = ran.shapes[0][0]
    if len(back) < rows:  # Rows beyond the splits were not sent.
        back = torch.cat([back, back.new_zeros(rows - len(back), *back.shape[1:])])
    return [back]
