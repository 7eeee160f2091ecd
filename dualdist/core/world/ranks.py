"""Horovod's six numbers of this process, and the names of its backend, transport and launcher."""

from __future__ import annotations

import os

import torch

from .. import accelerator
from ..launch import detect
from ..types import Launch
from .context import current_or_inherited


def rank() -> int:
    """Return the rank of this process in the world, from 0. Local. Raises NotInitializedError before `init()`."""
    return current_or_inherited().world.rank


def size() -> int:
    """Return the number of processes in the world. Local. Raises NotInitializedError before `init()`."""
    return current_or_inherited().world.size


def local_rank() -> int:
    """Return the rank of this process on its node, from 0. Local. Raises NotInitializedError before `init()`."""
    return current_or_inherited().world.local_rank


def local_size() -> int:
    """Return the number of processes on this node. Local. Raises NotInitializedError before `init()`."""
    return current_or_inherited().world.local_size


def cross_rank() -> int:
    """Return the index among processes of this local rank. Local. Raises NotInitializedError before `init()`."""
    return current_or_inherited().world.cross_rank


def cross_size() -> int:
    """Return the number of processes of this local rank. Local. Raises NotInitializedError before `init()`."""
    return current_or_inherited().world.cross_size


def is_homogeneous() -> bool:
    """Return whether all nodes run equally many processes. Local. Raises NotInitializedError before `init()`."""
    world = current_or_inherited().world
    return world.local_size * world.cross_size == world.size


def backend_name() -> str:
    """Return which backend runs: "torch", "horovod" or "local". Local. Raises NotInitializedError before `init()`."""
    return current_or_inherited().backend.name


def transport_name() -> str:
    """Return what transfers the data: "nccl", "xccl", "hccl", "cncl", "gloo", "mpi" or "local". Local.

    Raises NotInitializedError before `init()`.
    """
    return current_or_inherited().backend.transport


def launcher_name() -> str:
    """Return what started this process, such as "torchrun". Local. Raises NotInitializedError before `init()`."""
    return current_or_inherited().launch.launcher


def launch_info() -> Launch:
    """Return what the launcher's environment variables say about this process. Local. It works before `init()`.

    Raises ConfigurationError if the variables contradict each other.
    """
    return detect(os.environ)


# The device on which this process trains.


def device() -> torch.device:
    """Return the accelerator of this process, such as cuda:1; the CPU if it sees none. Local.

    `init` chooses it: the device to which the transport is bound, else the visible device with the local rank's number.
    A process that sees one device takes that one.

    Raises NotInitializedError before `init()` on a machine with an accelerator.
    """
    return current_or_inherited().device if accelerator.kind() else torch.device("cpu")
