"""Data-parallel training under Horovod's API, on torch.distributed or on real Horovod.

Most scripts need ten names: init, rank, size, device, DistributedSampler, DistributedDataParallel, allreduce,
DistributedOptimizer, broadcast_parameters, checkpoint.CheckpointManager. `help(dualdist.allreduce)` describes one.

Public names are imported at their first use, so that `import dualdist.core.launch` and the command do not import torch.
Their list is __init__.pyi, which type checkers read, too.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from . import core

__version__ = "0.1.0"

_STUB = Path(__file__).with_suffix(".pyi").read_text()
_HOME = {
    name: module
    for module, names in re.findall(r"^from (\S+) import (\([^)]*\)|.*)$", _STUB, re.MULTILINE)
    for name in re.findall(r"(\w+) as ", names)
}
"""Public name -> the module that it is from; "." for those that are modules themselves."""

__all__ = tuple(sorted(_HOME))

core.register(
    {
        "adasum": "dualdist.adasum",
        "arrival_order": "dualdist.arrival_order",
        "torch_backend": "dualdist.core.backends.torch:TorchBackend",
        "local_backend": "dualdist.core.backends.local:LocalBackend",
        "batch_norm": "dualdist.sync_batch_norm",
        "comm_hook": "dualdist.comm_hooks:checked_comm_hook",
        "communicators": "dualdist.mpi.communicators",
        "compare_start": "dualdist.replicas:warn_of_differences",
        "copies": "dualdist.copies",
        "device_groups": "dualdist.devices.groups",
        "devices": "dualdist.devices.choice",
        "file_board": "dualdist.local_boards:FileBoard",
        "host_board": "dualdist.local_boards",
        "horovod": "dualdist.horovod",
        "horovod_backend": "dualdist.horovod.backend:HorovodBackend",
        "horovods_store": "dualdist.horovod.http_store",
        "keep_freed_memory": "dualdist.freed_memory:keep_freed_memory",
        "marks": "dualdist.other_launchers:check_marks",
        "mpi": "dualdist.mpi.meeting",
        "mpi_transport": "dualdist.mpi.transport",
        "observation": "dualdist.observation.world:WorldObservation",
        "run_ahead": "dualdist.devices.ahead:Ahead",
        "through_host": "dualdist.devices.through_host:ThroughHost",
        "part_of_world": "dualdist.mpi.communicators:part_of_world",
        "process_manager": "dualdist.exec:process_managers_board",
        "sharding": "dualdist.sharding.checkpoints",
        "shared_memory": "dualdist.shared_memory:share_host",
        "sparse_gradients": "dualdist.sparse_allreduce:combined_gradients",
        "site_launcher": "dualdist.other_launchers:site_launcher",
        "slurm_entry": "dualdist.slurm:entry_of_node",
        "slurm_board": "dualdist.slurm:slurm_board",
        "streams": "dualdist.devices.streams",
        "torch_groups": "dualdist.sharding.meshes",
    }
)

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
    if _HOME[name] == ".":
        return importlib.import_module(f".{name}", __name__)  # which also sets the attribute
    value = globals()[name] = getattr(importlib.import_module(_HOME[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
