"""The kinds of calls: one row per kind, with what the agreement, the timeline and ranks in `join` need to know."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Data(Enum):
    """When the data of a call is sent."""

    NONE = "none"
    """Never: the call ends with the agreement."""
    AFTER = "after"
    """After the agreement."""
    BEFORE = "before"
    """Before the agreement, over `Channel.gradients`. Every member must receive it, even if the calls differ."""


class WhenJoined(Enum):
    """What a rank that has joined does while the other ranks run a call; collectives/join.py does it."""

    UNSUPPORTED = "unsupported"
    """It cannot take part: the call raises HorovodInternalError on the other ranks."""
    NOTHING = "nothing"
    """Nothing: the call has no data."""
    REDUCTION = "reduction"
    """It contributes values that do not change the result of the reduction."""
    GRADIENTS = "gradients"
    """It contributes zeros to each bucket of gradients."""


@dataclass(frozen=True)
class Kind:
    """One kind of call."""

    name: str
    """Its name in error messages."""
    event: str
    """Its name on the timeline, as Horovod writes it (horovod/common/timeline.cc)."""
    data: Data = Data.AFTER
    when_joined: WhenJoined = WhenJoined.UNSUPPORTED

    def __str__(self) -> str:
        return self.name


ALLREDUCE = Kind("allreduce", "ALLREDUCE", when_joined=WhenJoined.REDUCTION)
GROUPED_ALLREDUCE = Kind("grouped_allreduce", "ALLREDUCE", when_joined=WhenJoined.REDUCTION)
ALLGATHER = Kind("allgather", "ALLGATHER")
GROUPED_ALLGATHER = Kind("grouped_allgather", "ALLGATHER")
ALLGATHER_OBJECT = Kind("allgather_object", "ALLGATHER")
BROADCAST = Kind("broadcast", "BROADCAST")
BROADCAST_OBJECT = Kind("broadcast_object", "BROADCAST")
BROADCAST_PARAMETERS = Kind("broadcast_parameters", "BROADCAST")
ALLTOALL = Kind("alltoall", "ALLTOALL")
REDUCESCATTER = Kind("reducescatter", "REDUCESCATTER")
GROUPED_REDUCESCATTER = Kind("grouped_reducescatter", "REDUCESCATTER")
REDUCE = Kind("reduce", "REDUCE")
GATHER = Kind("gather", "GATHER")
GATHER_OBJECT = Kind("gather_object", "GATHER")
SCATTER = Kind("scatter", "SCATTER")
SCATTER_OBJECT = Kind("scatter_object", "SCATTER")
SYNC_BATCH_NORM = Kind("SyncBatchNorm", "ALLGATHER")

BARRIER = Kind("barrier", "BARRIER", Data.NONE, WhenJoined.NOTHING)
JOIN = Kind("join", "JOIN", Data.NONE)
ADD_PROCESS_SET = Kind("add_process_set", "ADD_PROCESS_SET", Data.NONE)
DEVICE_MESH = Kind("device_mesh", "DEVICE_MESH", Data.NONE)
REMOVE_PROCESS_SET = Kind("remove_process_set", "REMOVE_PROCESS_SET", Data.NONE)

# The first two compare the layout of the gradients when a wrapper is made. GRADIENTS ends each backward pass.
OPTIMIZER = Kind("DistributedOptimizer", "DISTRIBUTEDOPTIMIZER", Data.NONE)
DATA_PARALLEL = Kind("DistributedDataParallel", "DISTRIBUTEDDATAPARALLEL", Data.NONE)
GRADIENTS = Kind("gradient synchronization", "ALLREDUCE", Data.BEFORE, WhenJoined.GRADIENTS)
