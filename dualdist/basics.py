"""Joining and leaving the world, and who we are in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .collectives.join import stand_in
from .context import current, device, is_initialized, join_world, leave_world
from .errors import ConfigurationError
from .launch import detect
from .process_sets import ProcessSet, forget_world, register_world
from .types import Launch

__all__ = (
    "backend_name",
    "cross_rank",
    "cross_size",
    "device",
    "init",
    "is_homogeneous",
    "is_initialized",
    "launch_info",
    "launcher_name",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
    "transport_name",
)


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
    *,
    backend: str | None = None,
    transport: str | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> None:
    """Join the world. Collective: every launched process must call it. A second call does nothing.

    Args:
        comm: an mpi4py communicator that is the world, or the list of all ranks; None: what the launcher says.
        process_sets: process sets to register, or "dynamic" (sets can always be added later).
        backend: "torch", "horovod" or "local". None: DUALDIST_BACKEND, an engine that already runs in this process,
            or what the launcher stands for.
        transport: "nccl", "gloo" or "mpi". None: DUALDIST_TRANSPORT, or what the machine has.
        init_method, rank, world_size: as in torch.distributed.init_process_group: "tcp://host:port", "file:///path" or
            "env://".

    Raises:
        ConfigurationError: an argument or the environment is wrong, or the engine is not installed.
        WorldMismatchError: the engine joined another world than the launcher started.
    """
    if is_initialized():
        return
    arguments = {
        "comm": comm, "process_sets": process_sets, "backend": backend, "transport": transport,
        "init_method": init_method, "rank": rank, "world_size": world_size,
    }  # fmt: skip
    override: dict[str, Any] = {"init_method": init_method, "rank": rank, "size": world_size}
    if hasattr(comm, "Get_rank"):
        override |= {"rank": comm.Get_rank(), "size": comm.Get_size()}
    context = join_world(stand_in, backend, transport, override, os.environ)
    context.arguments = arguments
    try:
        if isinstance(comm, list | tuple) and sorted(comm) != list(range(context.world.size)):
            raise ConfigurationError(
                f"`comm` must name all {context.world.size} ranks, but is {list(comm)} instead. "
                "Use init(process_sets=) for collectives over some of the ranks."
            )
        register_world([] if process_sets is None or process_sets == "dynamic" else process_sets)  # type: ignore[arg-type]
    except BaseException:
        shutdown()
        raise


def shutdown() -> None:
    """Leave the world. Does nothing when none is joined; runs by itself when the process ends."""
    forget_world()
    leave_world()


def rank() -> int:
    """Return this process's number in the world, from 0. Raises NotInitializedError before `init()`."""
    return current().world.rank


def size() -> int:
    """Return the number of processes in the world. Raises NotInitializedError before `init()`."""
    return current().world.size


def local_rank() -> int:
    """Return this process's number on its node, from 0. Raises NotInitializedError before `init()`."""
    return current().world.local_rank


def local_size() -> int:
    """Return the number of processes on this node. Raises NotInitializedError before `init()`."""
    return current().world.local_size


def cross_rank() -> int:
    """Return this process's place among those of its local rank. Raises NotInitializedError before `init()`."""
    return current().world.cross_rank


def cross_size() -> int:
    """Return the number of processes of this local rank. Raises NotInitializedError before `init()`."""
    return current().world.cross_size


def is_homogeneous() -> bool:
    """Return whether every node runs equally many processes. Raises NotInitializedError before `init()`."""
    world = current().world
    return world.local_size * world.cross_size == world.size


def backend_name() -> str:
    """Return which engine runs: "torch", "horovod" or "local". Raises NotInitializedError before `init()`."""
    return current().backend.name


def transport_name() -> str:
    """Return what carries the data: "nccl", "gloo", "mpi" or "local". Raises NotInitializedError before `init()`."""
    return current().backend.transport


def launcher_name() -> str:
    """Return what started this process, such as "torchrun". Raises NotInitializedError before `init()`."""
    return current().launch.launcher


def launch_info() -> Launch:
    """Return what the launcher says of this process, without joining anything.

    Raises ConfigurationError when the launcher's variables contradict each other.
    """
    return detect(os.environ)
