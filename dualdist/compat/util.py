"""What scripts import from horovod.common.util: mostly queries of the installation, which work before `init()`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

import dualdist

__all__ = (
    "ccl_built",
    "check_extension",
    "cuda_built",
    "ddl_built",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
)

T = TypeVar("T")


def _query(name: str) -> Callable[[bool], bool]:
    def query(verbose: bool = False) -> bool:
        return bool(getattr(dualdist, name)())

    query.__name__ = query.__qualname__ = name
    query.__doc__ = f"Return `{name}()` as a bool."
    return query


ccl_built, cuda_built, ddl_built, gloo_built, mpi_built, nccl_built, rocm_built = map(
    _query, ("ccl_built", "cuda_built", "ddl_built", "gloo_built", "mpi_built", "nccl_built", "rocm_built")
)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether horovod.`ext_base_name` exists: only PyTorch's does."""
    return ext_base_name == "torch"


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError unless `ext_name` is horovod.torch."""
    if ext_name != "horovod.torch":
        raise ImportError(f"{ext_name} is not available: dualdist.compat replaces only horovod.torch.")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether the framework sees a GPU."""
    return extension_available(ext_base_name) and torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether `num_rank` is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Return `items` in `count` parts. If they cannot be equal, the first ones are longer by one."""
    size, more = divmod(len(items), count)
    ends = [part * size + min(part, more) for part in range(count + 1)]
    return [items[start:end] for start, end in itertools.pairwise(ends)]
