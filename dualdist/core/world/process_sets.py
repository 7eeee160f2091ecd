"""Process sets: collectives over some of the ranks. Names and rules are those of horovod/common/process_sets.py.

And torch's DeviceMesh over the joined world, each dimension of which is a process set, too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from ..agreement.call import Call, Data, Kind, call_site
from ..agreement.channel import Channel
from ..agreement.matching import Verdict
from ..backends.base import Group
from ..backends.torch_interface import DeviceMesh, TorchRanks, new_mesh, ranks_of_torch_group, world_group
from ..checks import instance, integer, items, text
from .context import current, current_or_inherited, is_initialized

ADD_PROCESS_SET = Kind("add_process_set", "ADD_PROCESS_SET", Data.NONE)
REMOVE_PROCESS_SET = Kind("remove_process_set", "REMOVE_PROCESS_SET", Data.NONE)
DEVICE_MESH = Kind("device_mesh", "DEVICE_MESH", Data.NONE)


class ProcessSet:
    """Some of the ranks of the world. Once the set is registered, collectives can run among them.

    ranks: global ranks in any order, or an mpi4py communicator, which may be another one on each rank, as after
    `comm.Split`. Register the set with `init(process_sets=)` or `add_process_set`; until then `process_set_id` is None.
    Raises ValueError when a rank is not an integer, negative or occurs twice.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    """Global ranks in ascending order. Those of a communicator are known when the set is registered."""
    mpi_comm: Any = None
    """The mpi4py communicator that was given. That of `global_process_set`: what was given to `init`."""

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        if is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
        else:
            self.ranks = _checked_ranks("ranks_or_comm", ranks_or_comm)

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSet:
        """Return the set itself: the copy of a model or an optimizer uses the same set."""
        return self

    def _registered(self) -> bool:
        return self.process_set_id is not None and is_initialized()

    def size(self) -> int | None:
        """Return the number of ranks, None while the set is not registered."""
        return len(self.ranks or ()) if self._registered() else None

    def rank(self) -> int | None:
        """Return this process's index in the set, None while the set is not registered.

        Raises ValueError when this process is not part of the set.
        """
        if not self._registered():
            return None
        if current_or_inherited().world.rank not in (self.ranks or ()):
            raise ValueError("Process is not part of provided process set.")
        return (self.ranks or []).index(current_or_inherited().world.rank)

    def included(self) -> bool | None:
        """Return whether this process is part of the set."""
        return None if self.ranks is None else current_or_inherited().world.rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


ProcessSetLike: TypeAlias = ProcessSet | TorchRanks
"""What the arguments `process_set` may be: a ProcessSet, one dimension of a mesh, or a group of torch."""


def is_communicator(value: Any) -> bool:
    """Return whether `value` is a communicator of mpi4py."""
    return hasattr(value, "Get_group")


def _checked_ranks(name: str, ranks: Any) -> list[int]:
    """Return the ranks in ascending order. Raises TypeError or ValueError, which names the parameter `name`."""
    given = items(name, ranks, "a list of ranks", "Pass whole numbers, such as [0, 1].")
    try:
        checked = sorted(integer(f"{name}[{place}]", rank, least=0) for place, rank in enumerate(given))
    except TypeError as error:
        raise ValueError(str(error)) from None  # as in Horovod
    if len(set(checked)) != len(checked):
        raise ValueError(f"`{name}` must not repeat a rank, but is {checked} instead. Name each rank once.")
    return checked


def _ranks_of_communicator(comm: Any) -> list[int]:
    """Return the global ranks of the processes of `comm`, a communicator, in ascending order.

    Raises ValueError if some are not in the world, or MPI did not start the world.
    """
    from mpi4py import MPI

    group, world = comm.Get_group(), _mpi_group_of_world(MPI.COMM_WORLD)
    numbers = current().world
    if (world.Get_size(), world.Get_rank()) != (numbers.size, numbers.rank):
        raise ValueError(
            f"`process_set` must be a list of ranks, because MPI does not have this world of {numbers.size} "
            f"processes: this process is rank {world.Get_rank()} of {world.Get_size()} in MPI. Start the script with "
            "mpirun, and without init(rank=)."
        )
    ranks = sorted(MPI.Group.Translate_ranks(group, range(group.Get_size()), world))
    if MPI.UNDEFINED in ranks:
        raise ValueError(
            f"`process_set` must be a communicator of processes of this world, but {ranks.count(MPI.UNDEFINED)} of its "
            f"{len(ranks)} processes are in another one. Split the communicator that was given to init(comm=)."
        )
    return ranks


def _mpi_group_of_world(comm_world: Any) -> Any:
    """Return the group of MPI with the processes of the world, in the order of their ranks."""
    comm: Any = current().arguments.get("comm")
    if is_communicator(comm):
        return comm.Get_group()
    group, size = comm_world.Get_group(), comm_world.Get_size()
    is_part = comm is not None and len(comm) < size and max(comm) < size
    return group.Incl(comm) if is_part else group


global_process_set = ProcessSet([])
"""All ranks of the world. Joining a world sets its `ranks`, as in Horovod."""
global_process_set.process_set_id = 0


def register_world(process_sets: Sequence[ProcessSet | Sequence[int]], comm: Any = None) -> None:
    """Register the global process set and then `process_sets`. Collective over the world. comm: as for `init`."""
    context = current()
    global_process_set.ranks = list(range(context.world.size))
    global_process_set.mpi_comm = comm if is_communicator(comm) else None
    context.process_sets[0] = global_process_set
    for process_set in process_sets:
        add_process_set(process_set)


def forget_world() -> None:
    """Mark every set but the global one as not registered. Does nothing if no world is joined. Local."""
    if not is_initialized():
        return
    process_sets: dict[int, ProcessSet] = current().process_sets
    for process_set in process_sets.values():
        if process_set is not global_process_set:
            process_set.process_set_id = None
    process_sets.clear()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set and return it. Collective: every rank of the world must call it, members or not.

    If the ranks give different communicators of mpi4py, the set of each is registered, in ascending order
    (horovod/common/operations.cc, horovod_init_multi_comm).

    Raises ValueError if the set is registered already, is empty, or has a rank or a process that is not in the world;
    BackendUnavailableError if the installed Horovod cannot connect its ranks; StallError if a rank stops in this call.
    """
    with reporting(ADD_PROCESS_SET):
        added = _checked(process_set)
    context = current()

    def register(group: Group, verdict: object) -> list[tuple[list[int], int]]:
        return [(members, context.add_channel(members)) for members in _sets_of_all(group, added)]

    for members, set_id in context.channels[0].run(_call(ADD_PROCESS_SET, added), register):
        registered = added if members == added.ranks else ProcessSet(members)
        registered.process_set_id = set_id
        context.process_sets[set_id] = registered
    return added


def _call(kind: Kind, process_set: ProcessSet) -> Call:
    """Return the call that adds or removes `process_set`. Only lists of ranks must be equal on all ranks."""
    is_from_mpi = process_set.mpi_comm is not None
    argument = ("communicator", True) if is_from_mpi else ("process_set", tuple(process_set.ranks or ()))
    return Call(kind, (argument,), site=call_site())


def _sets_of_all(group: Group, process_set: ProcessSet) -> list[list[int]]:
    """Return the ranks of the different process sets that the members of `group`, the world, have given, in order."""
    ranks = process_set.ranks or []
    if process_set.mpi_comm is None:
        return [ranks]
    members = set(ranks)
    own = bytes(rank in members for rank in range(group.size))
    return sorted(
        [rank for rank, is_member in enumerate(row) if is_member] for row in set(group.allgather_bytes(own))
    )


def _checked(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Return `process_set` as a ProcessSet. Raises ValueError if it cannot be registered."""
    context = current()
    added = process_set
    if is_communicator(added):
        added = ProcessSet(added)
    elif not isinstance(added, ProcessSet):
        added = ProcessSet(_checked_ranks("process_set", added))
    if added.mpi_comm is not None:
        added.ranks = _ranks_of_communicator(added.mpi_comm)
    ranks = added.ranks or []
    if not ranks or ranks[0] < 0 or ranks[-1] >= context.world.size:
        raise ValueError(
            f"`process_set` must name at least one rank, all below {context.world.size}, but has {ranks} instead."
        )
    if any(other.ranks == ranks for set_id, other in context.process_sets.items() if set_id >= 0):
        use = "hvd.global_process_set" if len(ranks) == context.world.size else "the one that is there"
        raise ValueError(
            f"A process set with ranks {ranks} is registered already; every set must be registered once. Use {use}."
        )
    return added


def _process_set_of_ranks(name: str, ranks: Sequence[int]) -> ProcessSet:
    """Return a process set of `ranks`, for the argument `name`. Collective over `ranks` alone, if no set has them yet.

    Other ranks do not know such a set, so `remove_process_set` does not take it; it lasts as long as the world.
    """
    context, own = current(), ProcessSet(ranks)
    for known in context.process_sets.values():
        if known.ranks == own.ranks:
            return known  # type: ignore[no-any-return]
    if context.world.rank not in ranks:
        raise ValueError(f"`{name}` must have this rank, {context.world.rank}, but has {own.ranks} instead.")
    own.process_set_id = context.add_members_channel(own.ranks or [])
    context.process_sets[own.process_set_id] = own
    return own


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set and return whether it was registered. Collective: every rank of the world must call it.

    If it was made of a communicator, the sets that the other ranks give are removed as well, as `add_process_set` adds
    them. The global process set cannot be removed. Raises TypeError if `process_set` is no ProcessSet.
    """
    context = current()
    with reporting(REMOVE_PROCESS_SET):
        fix = "Pass what add_process_set() returned."
        instance("process_set", process_set, ProcessSet, "a ProcessSet", fix)
    set_id = process_set.process_set_id
    if set_id is None or set_id <= 0 or context.process_sets.get(set_id) is not process_set:
        return False

    def remove(group: Group, verdict: object) -> None:
        sets = _sets_of_all(group, process_set)
        for number, removed in list(context.process_sets.items()):
            if number > 0 and removed.ranks in sets:
                context.channels.pop(number).close()
                del context.process_sets[number]
                removed.process_set_id = None

    context.channels[0].run(_call(REMOVE_PROCESS_SET, process_set), remove)
    return True


def ranks_of_set(process_set: ProcessSetLike) -> list[int]:
    """Return the global ranks of the argument `process_set`, in ascending order. Local.

    Raises TypeError, or ValueError if this rank is not among them.
    """
    ranks = ranks_of_torch_group(process_set)
    if ranks is None:
        ranks = checked_process_set(process_set, registered=True).ranks or []
    if current_or_inherited().world.rank not in ranks:
        raise ValueError(
            f"`process_set` must have this rank, {current_or_inherited().world.rank}, but has {ranks}."
        )
    return sorted(ranks)


def channel_of(process_set: ProcessSetLike) -> Channel:
    """Return the channel of `process_set`.

    Raises TypeError if the set is not registered, as Horovod does, and ValueError if this process is not part of it.
    """
    context = current()
    if not isinstance(process_set, ProcessSet) or process_set.process_set_id is None:
        process_set = checked_process_set(process_set, registered=True)
    set_id = process_set.process_set_id
    channel = None if set_id is None else context.channels.get(set_id)
    if channel is None:
        raise ValueError(f"`process_set` must be registered, but is {process_set} instead.")
    if channel.group.rank < 0:
        raise ValueError(f"Process {context.world.rank} is not part of {process_set}.")
    return channel


def checked_process_set(
    process_set: Any, name: str = "process_set", *, registered: bool = False
) -> ProcessSet:
    """Return the process set that the argument `name` means. registered: it must be in use.

    Collective over its members if it is a mesh dimension or a group of torch whose ranks have no process set yet.
    Raises TypeError, ValueError if this rank is not in the group, BackendUnavailableError if it cannot be connected.
    """
    ranks = ranks_of_torch_group(process_set)
    if ranks is not None:
        return _process_set_of_ranks(name, ranks)
    rule = "a ProcessSet, a DeviceMesh of one dimension or a ProcessGroup of torch"
    instance(name, process_set, ProcessSet, rule, "Use add_process_set(ranks), or a dimension: mesh['data'].")
    if registered and process_set.process_set_id is None:
        raise TypeError(
            f"`{name}` must be registered, but is {process_set} instead. "
            "Call add_process_set(), or give it to init(process_sets=)."
        )
    return process_set  # type: ignore[no-any-return]


class reporting:  # not a generator, which takes longer
    """A `with` block before this rank makes a call of `kind`. If it raises, let the other ranks raise, too.

    Therefore they do not wait for this rank. Nothing is reported without a world, or on a rank outside the set. If
    `process_set` is no process set, the error is reported to the whole world.
    """

    def __init__(self, kind: Kind, process_set: Any = None) -> None:
        self._kind, self._process_set = kind, process_set

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            known = isinstance(self._process_set, ProcessSetLike)
            with contextlib.suppress(TypeError, ValueError):
                channel_of(self._process_set if known else global_process_set).fail(self._kind, error)


# torch's DeviceMesh over the joined world, for torch's sharding: fully_shard, parallelize_module and others.


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
    with reporting(DEVICE_MESH):
        sizes, labels = _checked_mesh(shape, names, context.world.size)
    arguments = ("shape", sizes), ("names", labels)

    def make(group: Group, verdict: Verdict) -> DeviceMesh:
        context.backend.open_process_group()  # dualdist.compat's `init` leaves it out
        return new_mesh(context.device.type, sizes, labels)

    return context.channels[0].run(Call(DEVICE_MESH, arguments, site=call_site()), make)


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
