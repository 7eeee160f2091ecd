"""What the installed torch was built with, under the names of Horovod's queries. Shared by torch.py and local.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import torch
import torch.distributed as dist

__all__ = ("built_into_torch",)


def built_into_torch() -> Mapping[str, bool | int]:
    """Return what torch's collectives can run on. MPI counts when mpi4py is installed, since it provides MPI.

    NCCL counts only with a GPU: recipes for Adasum scale the learning rate by `local_size()` if `nccl_built()`.
    """
    can_use_nccl = dist.is_nccl_available() and torch.cuda.is_available()
    return {
        "mpi_built": dist.is_mpi_available() or importlib.util.find_spec("mpi4py") is not None,
        "gloo_built": dist.is_gloo_available(),
        "nccl_built": _nccl_version_code() if can_use_nccl else 0,
        "cuda_built": torch.version.cuda is not None,
        "rocm_built": torch.version.hip is not None,
    }


def _nccl_version_code() -> int:
    """Return NCCL_VERSION_CODE as nccl.h computes it since 2.9."""
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)
