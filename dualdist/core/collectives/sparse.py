"""Sparse COO tensors: sparse_allreduce_async, and the sum that gradient synchronisation uses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..backends.base import Group
from ..checks import wrong
from ..compiling import not_compiled
from ..types import REDUCE_OP_NAMES, Average, Op, Sum
from ..world.process_sets import ProcessSetLike, global_process_set, reporting
from .allgather import GROUPED_ALLGATHER, plan_allgather
from .handles import synchronize
from .reduction import reduce_op
from .wire import allgather_rows


@not_compiled
def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: Op, process_set: ProcessSetLike = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to reduce a sparse COO tensor. Return a function that waits and returns the new sparse tensor.

    It gathers the indices and values of all ranks (horovod/torch/mpi_ops.py:567); Average divides the values.

    Collective: every member of `process_set` must call it.

    Args:
        tensor: any shape, equal on all ranks, and any dtype; the number of entries may differ between ranks.
        name: as for `allreduce`; None is allowed.
        op: Sum or Average.

    Raises:
        TypeError: `tensor` is not a sparse COO tensor.
        ValueError: `op` is neither Sum nor Average.
        HorovodInternalError: as for `allgather`.
    """
    with reporting(GROUPED_ALLGATHER, process_set):
        op = reduce_op(op)
        if op not in (Sum, Average):
            raise ValueError(
                f"`op` must be Sum or Average for sparse tensors, but is {REDUCE_OP_NAMES[op]} instead."
            )
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
            raise wrong("tensor", "a sparse COO tensor", tensor, "Use allreduce_async for others.", TypeError)
        own = tensor.coalesce()
        rows = own.indices().t().contiguous()
    plan = plan_allgather([rows, own.values()], name, grouped=True, process_set=process_set)

    def reduced(outputs: tuple[Any, ...]) -> torch.Tensor:
        indices, values, _ = outputs
        return _sparse(
            indices.t(), values / plan.channel.group.size if op == Average else values, tensor.shape
        )

    return functools.partial(synchronize, plan.submit(reduced))


def _sparse(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, device=values.device, check_invariants=False)


def sum_sparse(group: Group, tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return the sum of every member's sparse COO `tensor`, coalesced, with one sparse dimension: rows.

    None: a zero in the shape of `like`.
    """
    if tensor is None:
        no_rows = torch.zeros(1, 0, dtype=torch.int64, device=like.device)
        tensor = _sparse(no_rows, like.new_zeros(0, *like.shape[1:]), like.shape)
    own = tensor.coalesce() if tensor.sparse_dim() == 1 else tensor.to_dense().to_sparse(1)
    (indices, values), _ = allgather_rows(group, [own.indices().t().contiguous(), own.values()])
    return _sparse(indices.t(), values, like.shape).coalesce()


def add_sparse(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the sum of two sparse COO tensors, coalesced. torch's own has no float16 on the CPU."""
    first, second = first.coalesce(), second.coalesce()  # `*=` leaves a tensor uncoalesced
    indices = torch.cat([first.indices(), second.indices()], dim=1)
    return _sparse(indices, torch.cat([first.values(), second.values()]), first.shape).coalesce()
