"""Data-parallel training under Horovod's API, on torch.distributed or on real Horovod."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import lr, metrics, samplers, seeding
from .collectives import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    gather,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reduce,
    reducescatter,
    reducescatter_async,
    scatter,
    sparse_allreduce_async,
    synchronize,
)
from .collectives.compression import Compression
from .collectives.objects import allgather_object, broadcast_object, gather_object, scatter_object
from .errors import (
    BackendUnavailableError,
    CheckpointError,
    CollectiveMismatchError,
    ConfigurationError,
    DamagedCheckpointError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    NotInitializedError,
    ProcessEndedError,
    StallError,
    WorldMismatchError,
)
from .gradients.comm_hook import CommHookState
from .lifecycle import init, shutdown, start_timeline, stop_timeline
from .samplers import DistributedSampler, split_by_rank
from .seeding import seed_everything
from .training.optimizer import DistributedOptimizer, SynchronizedOptimizer
from .training.optimizer_state import broadcast_optimizer_state
from .training.parallel import DistributedDataParallel
from .training.parameters import broadcast_parameters
from .training.sync_batch_norm import SyncBatchNorm
from .types import Adasum, Average, Max, Min, Product, Sum
from .world.context import is_initialized
from .world.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from .world.ranks import (
    backend_name,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    device,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    launch_info,
    launcher_name,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    size,
    transport_name,
)

__all__ = (
    "Adasum",
    "Average",
    "BackendUnavailableError",
    "CheckpointError",
    "CollectiveMismatchError",
    "CommHookState",
    "Compression",
    "ConfigurationError",
    "DamagedCheckpointError",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "DistributedSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "NotInitializedError",
    "ProcessEndedError",
    "ProcessSet",
    "Product",
    "StallError",
    "Sum",
    "SyncBatchNorm",
    "SynchronizedOptimizer",
    "WorldMismatchError",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "backend_name",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "checkpoint",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "device",
    "elastic",
    "gather",
    "gather_object",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "launch_info",
    "launcher_name",
    "local_rank",
    "local_size",
    "lr",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reduce",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "samplers",
    "scatter",
    "scatter_object",
    "seed_everything",
    "seeding",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "spawn",
    "split_by_rank",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "transport_name",
)

if TYPE_CHECKING:  # a type checker that sees `__getattr__` would accept every name
    from . import checkpoint, elastic
    from .processes.function import run, spawn
else:

    def __getattr__(name: str) -> Any:
        if name not in _AT_FIRST_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        path, attribute = _AT_FIRST_USE[name]
        module = importlib.import_module(path, __name__)
        value = globals()[name] = module if attribute is None else getattr(module, attribute)
        return value


_AT_FIRST_USE = {
    "checkpoint": (".checkpoint", None),
    "elastic": (".elastic", None),
    "run": (".processes.function", "run"),
    "spawn": (".processes.function", "spawn"),
}
"""name -> its module, and its name there; None is the module itself. They would be a third of the import time."""


def __dir__() -> list[str]:
    return sorted({*globals(), *_AT_FIRST_USE})
