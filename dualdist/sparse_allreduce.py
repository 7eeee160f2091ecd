"""The sum or average of sparse COO tensors, whose rows the ranks gather: sparse_allreduce_async, and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .core.backends.base import Group
from .core.checks import wrong
from .core.collectives.allgather import GROUPED_ALLGATHER, plan_allgather
from .core.collectives.plan import synchronize
from .core.collectives.reduction import reduce_op
from .core.collectives.wire import allgather_rows
from .core.compiling import not_compiled
from .core.types import REDUCE_OP_NAMES, Average, Op, Sum
from .core.world import ProcessSetLike, global_process_set, reporting


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
            raise ValueError(f"`op` must be Sum or Average for sparse tensors, but is {REDUCE_OP_NAMES[op]} instead.")
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
            raise wrong("tensor", "a sparse COO tensor", tensor, "Use allreduce_async for others.", TypeError)
        own = tensor.coalesce()
        rows = own.indices().t().contiguous()
    plan = plan_allgather([rows, own.values()], name, grouped=True, process_set=process_set)

    def reduced(outputs: tuple[Any, ...]) -> torch.Tensor:
        indices, values, _ = outputs
        values = values / plan.channel.group.size if op == Average else values
        return _sparse(indices.t(), values, tensor.shape)

    return functools.partial(synchronize, plan.submit(reduced))


def combined_gradients(
    group: Group, own: torch.Tensor | None, like: torch.Tensor, dense_part: torch.Tensor | None, factor: float
) -> torch.Tensor:
    """Return the sum of every member's gradient times `factor`, plus the `dense_part`. Collective over `group`.

    own: this rank's; None: it has none. A dense one was sent before: the combined ones are `dense_part`, None if there
    are none. like: the parameter.
    """
    if own is None or not own.is_sparse:
        no_rows = torch.zeros(1, 0, dtype=torch.int64, device=like.device)
        own = _sparse(no_rows, like.new_zeros(0, *like.shape[1:]), like.shape)
    own = own.coalesce() if own.sparse_dim() == 1 else own.to_dense().to_sparse(1)
    (indices, values), _ = allgather_rows(group, [own.indices().t().contiguous(), own.values()])
    combined = _sparse(indices.t(), values, like.shape).coalesce()
    if factor != 1.0:
        combined *= factor
    if dense_part is None:
        return combined
    # torch's own sum has no float16 on the CPU. `*=` leaves a tensor uncoalesced.
    parts = [combined.coalesce(), dense_part.to_sparse(1).coalesce()]
    indices = torch.cat([part.indices() for part in parts], dim=1)
    return _sparse(indices, torch.cat([part.values() for part in parts]), like.shape).coalesce()


def _sparse(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, device=values.device, check_invariants=False)
