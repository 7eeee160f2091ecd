"""What is built into the backend and what is in use, under Horovod's names.

Before `init()` the functions describe the backend that `init()` would choose, and report that nothing is in use.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist

from .core.backends import TRANSPORTS, choose
from .core.backends.base import Backend
from .core.launch import detect, without_copies
from .core.world import current_or_inherited, is_initialized


def _facts() -> Mapping[str, bool | int]:
    if not is_initialized():
        env = without_copies(os.environ)
        return _built_into(choose(None, None, detect(env), env).backend)
    backend = current_or_inherited().backend
    if hasattr(backend, "facts"):
        return backend.facts()  # type: ignore[no-any-return]
    transport = TRANSPORTS.get(backend.transport)
    is_mpi, threads = transport is not None and transport.needs_mpi, False
    if is_mpi and importlib.util.find_spec("mpi4py") is not None:
        from mpi4py import MPI

        threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    used = {"mpi_enabled": is_mpi, "gloo_enabled": bool(transport) and not is_mpi, "mpi_threads_supported": threads}
    return {**_built_into(type(backend)), **used}


def _built_into(backend: type[Backend]) -> Mapping[str, bool | int]:
    """Return what is built into the backend, by the names of the functions here; what is missing is False.

    Horovod has a build of its own: its backend returns that in `built`, in `facts` also what is in use. The others use
    torch's. MPI counts if mpi4py is installed, which provides it. NCCL counts only with a GPU: recipes for Adasum scale
    the learning rate by `local_size()` if `nccl_built()`.
    """
    if hasattr(backend, "built"):
        return backend.built()  # type: ignore[no-any-return]
    can_use_nccl = dist.is_nccl_available() and torch.cuda.is_available()
    major, minor, patch = torch.cuda.nccl.version()[:3] if can_use_nccl else (0, 0, 0)
    return {
        "mpi_built": dist.is_mpi_available() or importlib.util.find_spec("mpi4py") is not None,
        "gloo_built": dist.is_gloo_available(),
        "nccl_built": int(major * 10000 + minor * 100 + patch),  # NCCL_VERSION_CODE in nccl.h since 2.9
        "cuda_built": torch.version.cuda is not None,
        "rocm_built": torch.version.hip is not None,
    }


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
