"""The collectives, under Horovod's names, on any backend: one file per collective.

Public functions are in the files here. plans/ defines what they do, and autograd.py defines their gradients.
reduction.py and movement.py do the work on a Group, with tensors in the format of wire.py.
"""

from __future__ import annotations

from ..compiling import not_compiled
from .allgather import allgather, allgather_async, grouped_allgather, grouped_allgather_async
from .allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from .alltoall import alltoall, alltoall_async
from .broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from .gather import gather, scatter
from .join import barrier, join
from .reduce import reduce
from .reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from .sparse import sparse_allreduce_async
from .synchronize import poll, synchronize

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

for _name in __all__:
    not_compiled(globals()[_name])
