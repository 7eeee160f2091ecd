"""torch's DeviceMesh over the joined world, and meshes and groups of torch as process sets.

torch's sharding takes meshes: fully_shard, parallelize_module and others.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..core.agreement.call import Data, Kind
from ..core.agreement.connections import Verdict
from ..core.backends.base import Group
from ..core.backends.torch_groups import adopted_config, world_group, wrapped
from ..core.checks import integer, items, text
from ..core.collectives.plan import Plan, make_call, planned
from ..core.world import ProcessSet, channel_of, current, global_process_set

DEVICE_MESH = Kind("device_mesh", "DEVICE_MESH", Data.NONE)


def ranks_of(group: Any) -> list[int] | None:
    """Return the global ranks of a process group of torch, or of a DeviceMesh with one dimension, else None.

    Raises ValueError if this rank is not in it, or torch has destroyed it.
    """
    is_mesh = isinstance(group, DeviceMesh)
    if not (group.ndim == 1 if is_mesh else isinstance(group, dist.ProcessGroup)):
        return None
    try:
        return list(dist.get_process_group_ranks(group.get_group() if is_mesh else group))
    except (IndexError, KeyError, RuntimeError, ValueError) as error:
        raise ValueError(f"{group} must have this rank, and be of the world that is joined.") from error


def process_set_of(ranks: Sequence[int], name: str) -> ProcessSet:
    """Return a process set of `ranks`, for the argument `name`. Collective over `ranks` alone, if no set has them yet.

    Other ranks do not know such a set, so `remove_process_set` does not take it; it lasts as long as the world.
    """
    context, own = current(), ProcessSet(ranks)
    for known in context.process_sets.values():
        if known.ranks == own.ranks:
            return known  # type: ignore[no-any-return]
    if context.world.rank not in ranks:
        raise ValueError(f"`{name}` must have this rank, {context.world.rank}, but has {own.ranks} instead.")
    # A negative number, the same on all members without a message.
    own.process_set_id = set_id = -1 - zlib.crc32(repr(own.ranks).encode())
    context.open_channel(set_id, own.ranks or [], among_members=True)
    context.process_sets[set_id] = own
    return own


def device_mesh(shape: Sequence[int] | None = None, names: Sequence[str] = ("data",)) -> DeviceMesh:
    """Return a DeviceMesh of torch over the joined world, in the order of the ranks. Collective over the world.

        mesh = hvd.device_mesh()                                                # fully_shard(model, mesh=mesh)
        mesh = hvd.device_mesh((hvd.size() // 4, 4), ("replicate", "shard"))    # HSDP: shards on 4 neighbours

    Its groups are those of torch.distributed, on every backend. With Horovod they are beside Horovod: over Gloo, and
    over NCCL if Horovod has it. What takes a `process_set` also takes one dimension, such as `mesh["shard"]`.

    Args:
        shape: the number of ranks in each dimension. Neighbours in the last dimension have adjacent ranks. None: one
            dimension with all ranks.
        names: of the dimensions.

    Raises:
        TypeError, ValueError: an argument is wrong, or the product of `shape` is not the size of the world.
        CollectiveMismatchError: the arguments differ between ranks.
        NotInitializedError: before `init()`.
    """
    return _plan_mesh(shape, names, process_set=global_process_set).run()


@planned(DEVICE_MESH)
def _plan_mesh(shape: object, names: object, *, process_set: ProcessSet) -> Plan[DeviceMesh]:
    context = current()
    sizes, labels = _checked_mesh(shape, names, context.world.size)

    def execute(group: Group, verdict: Verdict) -> DeviceMesh:
        context.backend.open_process_group()  # dualdist.compat's `init` leaves it out
        kind = context.device.type
        # torch may have no backend for the device, as for a GPU over MPI.
        with wrapped():
            return init_device_mesh(kind if kind in adopted_config() else "cpu", sizes, mesh_dim_names=labels)

    call = make_call(DEVICE_MESH, None, shape=sizes, names=labels)
    return Plan(process_set, channel_of(process_set), call, execute)


def _checked_mesh(shape: object, names: object, world_size: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return both arguments as tuples. Raises as `device_mesh` does."""
    fix = "Pass one for each dimension, such as ('replicate', 'shard')."
    labels = tuple(text("names", name, fix) for name in items("names", names, "a list of strings", fix))
    rule, fix = "a list of whole numbers, one for each name", f"The world has {world_size} ranks."
    given = [world_size] if shape is None else items("shape", shape, rule, fix)
    sizes = tuple(integer(f"shape[{place}]", number, least=1, fix=fix) for place, number in enumerate(given))
    if math.prod(sizes) != world_size:
        raise ValueError(
            f"`shape` must have the product {world_size}, the number of ranks, but is {sizes} instead. "
            "Compute it from hvd.size()."
        )
    if len(set(labels)) != len(sizes) or len(labels) != len(sizes):
        raise ValueError(
            f"`names` must be {len(sizes)} different strings, one for each dimension of `shape`, but is {labels} "
            "instead."
        )
    group = world_group()
    if group is not None and group.size() != world_size:
        raise ValueError(
            f"torch's default group must have the {world_size} ranks of the world, but has {group.size()} instead: "
            "the program has made it. Leave it to init()."
        )
    return sizes, labels
