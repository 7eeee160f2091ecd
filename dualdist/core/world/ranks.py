"""Horovod's six numbers of this process, and the names of its backend, transport and launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from .. import accelerator
from ..backends import choose
from ..launch import detect
from ..launch.environment import without_copies
from ..types import Launch
from .context import current_or_inherited, is_initialized


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
    """Return what transfers the data: "nccl", "xccl", "gloo", "mpi" or "local". Local.

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


# What is built into the backend and what is in use, under Horovod's names.
#
# Before `init()` the functions describe the backend that `init()` would choose, and report that nothing is in use.


def _facts() -> Mapping[str, bool | int]:
    if is_initialized():
        return current_or_inherited().backend.facts()
    env = without_copies(os.environ)
    return choose(None, None, detect(env), env).backend.built()


def mpi_threads_supported() -> bool:
    """Return whether several threads may call MPI, such as mpi4py and the backend at the same time. Local.

    Raises ValueError if MPI is not in use, as Horovod does.
    """
    if not mpi_enabled():
        raise ValueError("MPI must be in use, but is not. Start with mpirun, or choose the transport mpi.")
    return bool(_facts().get("mpi_threads_supported"))


def mpi_enabled() -> bool:
    """Return whether the collectives run over MPI. Local."""
    return bool(_facts().get("mpi_enabled"))


def mpi_built() -> bool:
    """Return whether the backend can run on MPI. Local."""
    return bool(_facts().get("mpi_built"))


def gloo_enabled() -> bool:
    """Return whether the collectives, or those of CPU tensors, run over Gloo. Local."""
    return bool(_facts().get("gloo_enabled"))


def gloo_built() -> bool:
    """Return whether the backend can run on Gloo. Local."""
    return bool(_facts().get("gloo_built"))


def nccl_built() -> int:
    """Return NCCL's version code (such as 22705) if the backend can run on NCCL, else 0. Local."""
    return int(_facts().get("nccl_built", 0))


def ddl_built() -> bool:
    """Return whether the backend can run on IBM's DDL. Local."""
    return bool(_facts().get("ddl_built"))


def ccl_built() -> bool:
    """Return whether the backend can run on Intel's oneCCL. Local."""
    return bool(_facts().get("ccl_built"))


def cuda_built() -> bool:
    """Return whether the backend was built for CUDA. Local."""
    return bool(_facts().get("cuda_built"))


def rocm_built() -> bool:
    """Return whether the backend was built for ROCm. Local."""
    return bool(_facts().get("rocm_built"))
