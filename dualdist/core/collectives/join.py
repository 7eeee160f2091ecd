"""join and barrier, and what a rank does after it has called `join`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..agreement.call import Call, Data, Kind, no_data
from ..agreement.connections import Verdict
from ..backends.base import Group
from ..checks import integer
from ..compiling import not_compiled
from ..world import ProcessSetLike, channel_of, current, global_process_set
from .plan import Plan, make_call, planned
from .reduction import Reduction, reduce_tensors

BARRIER = Kind("barrier", "BARRIER", Data.NONE, no_data)

after_join: list[Callable[[], None]] = []
"""Called on every rank when all have joined."""


@not_compiled
def join(device: int = -1) -> int:
    """Wait until every rank has joined, and take part in the other ranks' allreduces. Return the last rank to join.

    For uneven numbers of batches: a rank joins when it has no more data. It contributes zeros to Sum, Average and
    Adasum, and nothing to other ops; Average still divides by the size of the world. The other ranks can call
    allreduce, grouped_allreduce, barrier and gradient synchronisation meanwhile; other collectives raise
    HorovodInternalError on those ranks. Collective over the world.

    A rank misses the steps that the others make after it has joined. To train on, broadcast parameters, buffers,
    optimizer state and the state of a GradScaler from the rank that is returned. After the next reduction, rank 0 warns
    if parameters or options of the optimizer differ between ranks.

    Args:
        device: the number of the GPU for the zeros; -1: `hvd.device()`. It matters only if other ranks reduce on GPUs.

    Raises:
        HorovodInternalError: a rank did not join in time, or the backend failed.
    """
    number = integer("device", device, least=-1, fix="Pass the number of a GPU, or -1.")
    current().join_device_index = None if number < 0 else number
    last = channel_of(global_process_set).join()
    for function in after_join:
        function()
    return last


@not_compiled
def barrier(process_set: ProcessSetLike = global_process_set) -> None:
    """Return when every member of `process_set` has called it. Collective.

    Ranks that have joined count as having called it. Raises HorovodInternalError as `allreduce` does.
    """
    _plan_barrier(process_set=process_set).run()


@planned(BARRIER)
def _plan_barrier(*, process_set: ProcessSetLike) -> Plan[None]:
    return Plan(process_set, channel_of(process_set), make_call(BARRIER, None), lambda group, verdict: None)


def contribute_neutral(call: Call, group: Group, verdict: Verdict) -> None:
    """Contribute values that do not change the result of an allreduce, because this rank has called `join`."""
    arguments = dict(call.arguments)
    device = _device_of(arguments["device"])
    shapes = zip(arguments["shapes"], arguments["dtypes"], strict=True)
    tensors = [torch.empty(shape, dtype=getattr(torch, name), device=device) for shape, name in shapes]
    reduce_tensors(group, tensors, Reduction.of(call), contributes=False)


def _device_of(kind: str) -> torch.device:
    """Return the device of this rank that is of `kind`, such as "cuda"."""
    context = current()
    if kind == "cpu":
        return torch.device(kind)
    index = context.device.index if context.join_device_index is None else context.join_device_index
    return torch.device(kind) if index is None else torch.device(kind, index)
