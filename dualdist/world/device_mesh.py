"""torch's DeviceMesh over the joined world, for torch's sharding: fully_shard, parallelize_module and others."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..agreement import call_kinds
from ..agreement.call import Call, call_site
from ..agreement.matching import Verdict
from ..backends.base import Group
from ..backends.torch_interface import DeviceMesh, new_mesh, world_group
from ..checks import integer, items, text
from .context import current
from .process_sets import reporting


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
    context = current()
    with reporting(call_kinds.DEVICE_MESH):
        sizes, labels = _checked(shape, names, context.world.size)
    arguments = ("shape", sizes), ("names", labels)

    def make(group: Group, verdict: Verdict) -> DeviceMesh:
        context.backend.open_process_group()  # dualdist.compat's `init` leaves it out
        return new_mesh(context.device.type, sizes, labels)

    return context.channels[0].run(Call(call_kinds.DEVICE_MESH, arguments, site=call_site()), make)


def _checked(shape: object, names: object, world_size: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
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
