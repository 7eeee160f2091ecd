"""Data-parallel training under Horovod's API, on torch.distributed or on real Horovod."""

from __future__ import annotations

from .basics import (
    backend_name,
    cross_rank,
    cross_size,
    device,
    init,
    is_homogeneous,
    is_initialized,
    launch_info,
    launcher_name,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    transport_name,
)
from .collectives import *  # noqa: F403 - its __all__ is the list of public collectives
from .compression import Compression
from .errors import (
    BackendUnavailableError,
    CollectiveMismatchError,
    ConfigurationError,
    HorovodInternalError,
    NotInitializedError,
    StallError,
    WorldMismatchError,
)
from .objects import allgather_object, broadcast_object, gather_object, scatter_object
from .optimizer import DistributedOptimizer
from .parameters import broadcast_optimizer_state, broadcast_parameters
from .process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from .types import Adasum, Average, Max, Min, Product, Sum
