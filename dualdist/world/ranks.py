"""Horovod's six numbers of this process, and the names of its backend, transport and launcher."""

from __future__ import annotations

import os

from ..launch import detect
from ..types import Launch
from .context import current_or_inherited

__all__ = (
    "backend_name",
    "cross_rank",
    "cross_size",
    "is_homogeneous",
    "launch_info",
    "launcher_name",
    "local_rank",
    "local_size",
    "rank",
    "size",
    "transport_name",
)


def rank() -> int:
    """Return the rank of this process in the world, from 0. Raises NotInitializedError before `init()`."""
    return current_or_inherited().world.rank


def size() -> int:
    """Return the number of processes in the world. Raises NotInitializedError before `init()`."""
    return current_or_inherited().world.size


def local_rank() -> int:
    """Return the rank of this process on its node, from 0. Raises NotInitializedError before `init()`."""
    return current_or_inherited().world.local_rank


def local_size() -> int:
    """Return the number of processes on this node. Raises NotInitializedError before `init()`."""
    return current_or_inherited().world.local_size


def cross_rank() -> int:
    """Return this process's index among those with the same local rank. Raises NotInitializedError before `init()`."""
    return current_or_inherited().world.cross_rank


def cross_size() -> int:
    """Return the number of processes with this local rank, one per node. Raises NotInitializedError before `init()`."""
    return current_or_inherited().world.cross_size


def is_homogeneous() -> bool:
    """Return whether every node runs the same number of processes. Raises NotInitializedError before `init()`."""
    world = current_or_inherited().world
    return world.local_size * world.cross_size == world.size


def backend_name() -> str:
    """Return which backend runs: "torch", "horovod" or "local". Raises NotInitializedError before `init()`."""
    return current_or_inherited().backend.name


def transport_name() -> str:
    """Return what transfers the data: "nccl", "xccl", "gloo", "mpi" or "local".

    Raises NotInitializedError before `init()`.
    """
    return current_or_inherited().backend.transport


def launcher_name() -> str:
    """Return what started this process, such as "torchrun". Raises NotInitializedError before `init()`."""
    return current_or_inherited().launch.launcher


def launch_info() -> Launch:
    """Return what the launcher's environment variables say about this process. Local; works before `init()`.

    Raises ConfigurationError if the variables contradict each other.
    """
    return detect(os.environ)
