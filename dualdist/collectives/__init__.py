"""The collectives, under Horovod's names, on any backend: one file per collective.

Each file has the plan of its collective, the public functions, and the gradient. plan.py says what a plan is;
reduction.py and wire.py do the work on a Group.
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
from .handles import poll, synchronize
from .join import barrier, join
from .reduce import reduce
from .reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from .sparse import sparse_allreduce_async

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
    globals()[_name] = not_compiled(globals()[_name])
