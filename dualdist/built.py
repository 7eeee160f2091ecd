"""What is built into the backend and what is in use, under Horovod's names.

Before `init()` the functions describe the backend that `init()` would choose, and report that nothing is in use.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from .core.backends import choose
from .core.launch import detect
from .core.launch.environment import without_copies
from .core.world.context import current_or_inherited, is_initialized


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
