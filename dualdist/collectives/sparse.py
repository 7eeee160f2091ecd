"""Sparse COO tensors: sparse_allreduce_async, and the sum that gradient synchronisation uses."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..backends.base import Group
from ..types import Average, Sum
from ..world.context import current
from ..world.process_sets import ProcessSet, channel_of, global_process_set
from .allgather import allgather_async
from .movement import allgather_rows

__all__ = ("sparse_allreduce_async", "sum_sparse")


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to reduce a sparse COO tensor. Return a function that waits and returns the new sparse tensor.

    Gathers the indices and values of all ranks (horovod/torch/mpi_ops.py:567); Average divides the values.
    op: Sum or Average. Otherwise as `allreduce`.
    """
    if op not in (Sum, Average):
        raise ValueError(f"`op` must be Sum or Average for sparse tensors, but is {op!r} instead.")
    coalesced = tensor.coalesce()
    names = (None, None) if name is None else (f"{name}.indices", f"{name}.values")
    rows = coalesced.indices().t().contiguous()
    indices = allgather_async(rows, name=names[0], process_set=process_set)
    values = allgather_async(coalesced.values(), name=names[1], process_set=process_set)
    handles, size = current().handles, channel_of(process_set).group.size

    def wait() -> torch.Tensor:
        all_indices, all_values = handles.synchronize(indices), handles.synchronize(values)
        if op == Average:
            all_values = all_values / size
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape, check_invariants=False)

    return wait


def sum_sparse(group: Group, tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return the sum of every member's sparse COO `tensor`, coalesced. None: a zero in the shape of `like`."""
    if tensor is None:
        tensor = torch.sparse_coo_tensor(
            torch.zeros(1, 0, dtype=torch.int64),
            like.new_zeros(0, *like.shape[1:]),
            like.shape,
            check_invariants=False,
        )
    own = tensor.coalesce()
    indices, values = allgather_rows(group, [own.indices().t().contiguous(), own.values()])
    return torch.sparse_coo_tensor(
        indices.t(), values, like.shape, device=like.device, check_invariants=False
    ).coalesce()
