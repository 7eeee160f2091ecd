"""The names of horovod.torch.mpi_ops beside the public functions: `_basics`, and the autograd functions."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

import dualdist

from .exceptions import HorovodVersionMismatchError, get_version_mismatch_message
from .lifecycle import HorovodBasics

__all__ = (
    "EXTENSIONS",
    "_NULL",
    "HorovodAllgather",
    "HorovodAllreduce",
    "HorovodAlltoall",
    "HorovodBroadcast",
    "HorovodGroupedAllgather",
    "HorovodGroupedAllreduce",
    "HorovodGroupedReducescatter",
    "HorovodReducescatter",
    "HorovodVersionMismatchError",
    "_basics",
    "_cache",
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "cuda_built",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "get_ext_suffix",
    "get_extension_full_path",
    "get_version_mismatch_message",
    "gloo_built",
    "gpu_available",
    "handle_average_backwards_compatibility",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
)

# What scripts import from horovod.common.util: mostly queries of the installation, which work before `init()`.

T = TypeVar("T")

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


def split_list(items: Sequence[T], count: int) -> list[Sequence[T]]:
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


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables in the `with` block, except those that are None."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _cache(f: Callable[..., T]) -> Callable[..., T]:
    """Return `f` with its results kept by its arguments, which must be hashable."""
    results: dict[Any, T] = {}

    def wrapper(*args: Any, **kwargs: Any) -> T:
        key = (args, frozenset(kwargs.items()))
        if key not in results:
            results[key] = f(*args, **kwargs)
        return results[key]

    return wrapper


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether the version `ver` is at least `target`, which has the form major.minor.patch."""
    if not (isinstance(ver, str) and isinstance(target, str)):
        raise ValueError(f"`ver` and `target` must be strings, but are {ver!r} and {target!r} instead.")
    if len(target.split(".")) != 3:
        raise ValueError(f"`target` must be major.minor.patch, but is {target!r} instead.")
    return _release(ver) >= _release(target)


def _release(version: str) -> tuple[list[int], bool]:
    """Return the numbers of a version without trailing zeros, and whether it is no pre-release (PEP 440)."""
    release, rest = re.fullmatch(r"v?(\d+(?:\.\d+)*)(.*)", version.strip()).groups()  # type: ignore[union-attr]
    numbers = [int(part) for part in release.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers, not re.match(r"[._-]?(a|b|c|rc|alpha|beta|pre|preview|dev)", rest)


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


_NULL = ""
_basics = HorovodBasics(__file__, "mpi_lib_v2")
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(dualdist)


def _function(name: str, call: Callable[..., Any], *parameters: str, grouped: bool = False) -> Any:
    """Return a class like those of Horovod: `apply` has the parameters of Horovod's `forward`, the tensors included."""

    @classmethod  # type: ignore[misc]
    def apply(cls: type, *args: Any) -> Any:
        given = dict(zip(parameters, args, strict=False))
        tensors = list(args[len(parameters) :]) if grouped else given.pop("tensor")
        result = call(tensors, **given)
        return tuple(result) if grouped else result

    doc = f"The differentiable `{call.__name__}`, as an autograd function."
    return type(name, (torch.autograd.Function,), {"apply": apply, "__doc__": doc, "__module__": __name__})


_scales = ("prescale_factor", "postscale_factor")
HorovodAllreduce = _function(
    "HorovodAllreduce", dualdist.allreduce, "tensor", "average", "name", "op", *_scales, "process_set"
)
HorovodGroupedAllreduce = _function(
    "HorovodGroupedAllreduce",
    dualdist.grouped_allreduce,
    "average",
    "name",
    "op",
    *_scales,
    "process_set",
    grouped=True,
)
HorovodAllgather = _function("HorovodAllgather", dualdist.allgather, "tensor", "name", "process_set")
HorovodGroupedAllgather = _function(
    "HorovodGroupedAllgather", dualdist.grouped_allgather, "name", "process_set", grouped=True
)
HorovodBroadcast = _function(
    "HorovodBroadcast", dualdist.broadcast, "tensor", "root_rank", "name", "process_set"
)
HorovodAlltoall = _function("HorovodAlltoall", dualdist.alltoall, "tensor", "splits", "name", "process_set")
HorovodReducescatter = _function(
    "HorovodReducescatter", dualdist.reducescatter, "tensor", "name", "op", "process_set", *_scales
)
HorovodGroupedReducescatter = _function(
    "HorovodGroupedReducescatter",
    dualdist.grouped_reducescatter,
    "name",
    "op",
    "process_set",
    *_scales,
    grouped=True,
)
