"""Data-parallel training under Horovod's API, on torch.distributed or on real Horovod.

Public names are imported at their first use, so that `import dualdist.launch` and the command do not import torch.
__init__.pyi has the same names for type checkers.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "": ("checkpoint", "elastic", "lr", "metrics", "samplers", "seeding"),
    ".collectives": (
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
    ),
    ".collectives.compression": ("Compression",),
    ".collectives.objects": ("allgather_object", "broadcast_object", "gather_object", "scatter_object"),
    ".errors": (
        "BackendUnavailableError",
        "CheckpointError",
        "CollectiveMismatchError",
        "ConfigurationError",
        "DamagedCheckpointError",
        "HorovodInternalError",
        "HostsUpdatedInterrupt",
        "NotInitializedError",
        "ProcessEndedError",
        "ReplicaMismatchError",
        "StallError",
        "WorldMismatchError",
    ),
    ".gradients.comm_hook": ("CommHookState",),
    ".gradients.replicas": ("check_replicas",),
    ".lifecycle": ("init", "report", "shutdown", "start_timeline", "stop_timeline"),
    ".processes.function": ("run", "spawn"),
    ".samplers": ("DistributedSampler", "split_by_rank"),
    ".seeding": ("seed_everything",),
    ".training.optimizer": ("DistributedOptimizer", "SynchronizedOptimizer"),
    ".training.optimizer_state": ("broadcast_optimizer_state",),
    ".training.parallel": ("DistributedDataParallel",),
    ".training.parameters": ("broadcast_parameters",),
    ".training.sync_batch_norm": ("SyncBatchNorm",),
    ".types": ("Adasum", "Average", "Max", "Min", "Product", "Sum"),
    ".world.context": ("is_initialized",),
    ".world.process_sets": (
        "ProcessSet",
        "add_process_set",
        "device_mesh",
        "global_process_set",
        "remove_process_set",
    ),
    ".world.ranks": (
        "backend_name",
        "ccl_built",
        "cross_rank",
        "cross_size",
        "cuda_built",
        "ddl_built",
        "device",
        "gloo_built",
        "gloo_enabled",
        "is_homogeneous",
        "launch_info",
        "launcher_name",
        "local_rank",
        "local_size",
        "mpi_built",
        "mpi_enabled",
        "mpi_threads_supported",
        "nccl_built",
        "rank",
        "rocm_built",
        "size",
        "transport_name",
    ),
}
"""Module -> the public names that are from it. Those of "" are modules themselves."""

_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = tuple(sorted(_HOME))

_NAMES_IN_TORCH = {
    "all_gather_into_tensor": "allgather",
    "all_gather_object": "allgather_object",
    "all_to_all_single": "alltoall",
    "broadcast_object_list": "broadcast_object",
    "DDP": "DistributedDataParallel",
    "destroy_process_group": "shutdown",
    "get_backend": "transport_name",
    "get_node_local_rank": "local_rank",
    "get_rank": "rank",
    "get_world_size": "size",
    "init_process_group": "init",
    "new_group": "add_process_set",
    "reduce_scatter_tensor": "reducescatter",
}
"""What torch.distributed calls a function -> its name here. For names that differ less, Python asks "Did you mean"."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        text = f"module {__name__!r} has no attribute {name!r}"
        if name in _NAMES_IN_TORCH:
            text += f". Its name here is {_NAMES_IN_TORCH[name]!r}"
        raise AttributeError(text, name=name, obj=sys.modules[__name__])
    if not _HOME[name]:
        return importlib.import_module(f".{name}", __name__)  # which also sets the attribute
    value = globals()[name] = getattr(importlib.import_module(_HOME[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
