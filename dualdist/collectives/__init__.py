"""Collectives under Horovod's names: values, dtypes and layouts, agreement, handles and gradients, for any backend."""

from __future__ import annotations

from .allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)
from .alltoall import alltoall, alltoall_async, scatter
from .broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from .gather import allgather, allgather_async, gather, grouped_allgather, grouped_allgather_async
from .join import barrier, join, poll, synchronize
from .reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reduce,
    reducescatter,
    reducescatter_async,
)

__all__ = (
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "gather",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reduce",
    "reducescatter",
    "reducescatter_async",
    "scatter",
    "sparse_allreduce_async",
    "synchronize",
)
