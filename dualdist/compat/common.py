"""The names of horovod.common: `init` and the queries, exceptions, and what scripts import from its util.

`init` also sets Horovod's environment variables, and opens no default process group.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.torch_version import TorchVersion

import dualdist

from ..copies import add_copies
from ..core.launch import temporary_environment
from ..core.world import Context, ProcessSet, current, current_or_inherited
from ..horovod import horovod_variables

_T = TypeVar("_T")


@functools.wraps(dualdist.init)
def init(*args: Any, **kwargs: Any) -> None:
    Context.opens_process_group = False  # also when elastic training joins again
    dualdist.init(*args, **kwargs)
    add_copies(horovod_variables(current().world), os.environ)


class HorovodBasics:
    """The same functions as methods, as in horovod/common/basics.py. Its arguments name a library and are ignored."""

    HOROVOD_PROCESS_SET_ERROR_INIT = -1
    HOROVOD_PROCESS_SET_ERROR_DYNAMIC = -2
    HOROVOD_PROCESS_SET_ERROR_UNKNOWN_SET = -3
    HOROVOD_PROCESS_SET_ERROR_FOREIGN_SET = -4
    HOROVOD_PROCESS_SET_ERROR_SHUTDOWN = -5
    HOROVOD_PROCESS_SET_ERROR_EXISTING_SET = -6

    def __init__(self, pkg_path: str, *args: str) -> None:
        self.init = init

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(dualdist, name)
        except AttributeError:
            raise AttributeError(
                f"HorovodBasics has no {name!r} under dualdist.compat: there is no compiled library of Horovod. "
                "Use the functions of horovod.torch."
            ) from None

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        sets: dict[int, ProcessSet] = current_or_inherited().process_sets
        return {number: list(process_set.ranks or ()) for number, process_set in sets.items()}

    def _process_set_rank(self, process_set_id: int) -> int | None:
        return self._process_set(process_set_id).rank()

    def _process_set_size(self, process_set_id: int) -> int | None:
        return self._process_set(process_set_id).size()

    def _add_process_set_impl(self, ranks: Sequence[int]) -> int | None:
        if sorted(ranks) in self._get_process_set_ids_and_ranks().values():
            return None
        return dualdist.add_process_set(list(ranks)).process_set_id

    def _remove_process_set_impl(self, process_set_id: int) -> int | None:
        found = current_or_inherited().process_sets.get(process_set_id)
        return process_set_id if found is not None and dualdist.remove_process_set(found) else None

    @staticmethod
    def _process_set(process_set_id: int) -> ProcessSet:
        try:
            found: ProcessSet = current_or_inherited().process_sets[process_set_id]
        except KeyError:
            raise ValueError(f"`process_set_id` must be registered, but is {process_set_id} instead.") from None
        return found


_basics = HorovodBasics(__file__, "mpi_lib_v2")


# Exceptions.


def get_version_mismatch_message(name: str, version: str, installed_version: str | None) -> str:
    """Return the message of HorovodVersionMismatchError."""
    return (
        f"Framework {name} installed with version {installed_version} but found version {version}. "
        "This can result in unexpected behavior including runtime errors."
    )


class HorovodVersionMismatchError(ImportError):
    """Never raised here: dualdist is not compiled against a version of torch."""

    def __init__(self, name: str, version: str, installed_version: str | None) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version), name=name)
        self.version = version
        self.installed_version = installed_version


# The util of horovod.common: mostly queries of the installation, which work before `init()`.

EXTENSIONS = ["tensorflow", "torch", "mxnet"]
"""Horovod's extensions. Only torch's is available."""


def _query(name: str) -> Callable[..., bool | int]:
    def query(verbose: bool = False) -> bool | int:
        found: bool | int = getattr(dualdist, name)()
        return found

    query.__name__ = query.__qualname__ = name
    query.__doc__ = f"Return what `{name}()` returns."
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


def split_list(items: Sequence[_T], count: int) -> list[Sequence[_T]]:
    """Return `items` in `count` parts. If they cannot be equal, the first ones are longer by one."""
    size, more = divmod(len(items), count)
    ends = [part * size + min(part, more) for part in range(count + 1)]
    return [items[start:end] for start, end in itertools.pairwise(ends)]


def get_ext_suffix() -> str:
    """Return the suffix of compiled extensions for this Python."""
    return sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Return the path that a compiled extension of Horovod has beside the file `pkg_path`. No such file exists here."""
    return os.path.join(os.path.dirname(pkg_path), *args[:-1], args[-1] + get_ext_suffix())


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Do nothing: dualdist is not compiled against a version of a framework. Horovod warns if it is another one."""


def is_iterable(x: Any) -> bool:
    """Return whether `iter(x)` works."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def env(**kwargs: str | None) -> contextlib.AbstractContextManager[None]:
    """Set environment variables in the `with` block, except those that are None."""
    return temporary_environment({name: value for name, value in kwargs.items() if value is not None})


_cache = functools.cache


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether the version `ver` is at least `target`, which has the form major.minor.patch."""
    if not (isinstance(ver, str) and isinstance(target, str)):
        raise ValueError(f"`ver` and `target` must be strings, but are {ver!r} and {target!r} instead.")
    if len(target.split(".")) != 3:
        raise ValueError(f"`target` must be major.minor.patch, but is {target!r} instead.")
    return bool(TorchVersion(ver) >= target)


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, bool | None], Any]:
    """Return the function that converts Horovod's old parameter `average` to an op. reduce_ops: has Average and Sum."""

    def handle(op: Any, average: bool | None) -> Any:
        if average is None:
            return reduce_ops.Average if op is None else op
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed in v1.0",
            DeprecationWarning,
            stacklevel=3,
        )
        return reduce_ops.Average if average else reduce_ops.Sum

    return handle


handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(dualdist)
