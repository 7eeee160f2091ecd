"""The names of horovod.torch.mpi_ops beside the public functions: `_basics`, and the autograd functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import dualdist

from .lifecycle import HorovodBasics
from .util import (
    check_installed_version,
    get_average_backwards_compatibility_fun,
    gpu_available,
    num_rank_is_power_2,
)

__all__ = (
    "_NULL",
    "HorovodAllgather",
    "HorovodAllreduce",
    "HorovodAlltoall",
    "HorovodBroadcast",
    "HorovodGroupedAllgather",
    "HorovodGroupedAllreduce",
    "HorovodGroupedReducescatter",
    "HorovodReducescatter",
    "_basics",
    "check_installed_version",
    "get_average_backwards_compatibility_fun",
    "gpu_available",
    "handle_average_backwards_compatibility",
    "num_rank_is_power_2",
)

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
