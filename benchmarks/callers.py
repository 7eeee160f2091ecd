"""The contestants that call collectives: each joins its own world, and has the same functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from contestant import Contestant

__all__ = ("CALLERS", "Call", "Caller")

Call = Callable[[torch.Tensor], object]


class Caller(NamedTuple):
    """A process in a contestant's world. Each function takes a tensor of float32, (n,), n divisible by the size."""

    rank: int
    size: int
    calls: Mapping[str, Call]
    """collective -> the function. allreduce and broadcast work in place, reducescatter sums."""
    leave: Callable[[], None]


def _c10d() -> Caller:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    size = dist.get_world_size()

    def allgather(tensor: torch.Tensor) -> None:
        dist.all_gather_into_tensor(tensor.new_empty(size * len(tensor)), tensor)

    def alltoall(tensor: torch.Tensor) -> None:
        dist.all_to_all_single(torch.empty_like(tensor), tensor)

    def reducescatter(tensor: torch.Tensor) -> None:
        dist.reduce_scatter_tensor(tensor.new_empty(len(tensor) // size), tensor)

    calls: dict[str, Call] = {
        "allreduce": dist.all_reduce,
        "broadcast": partial(dist.broadcast, src=0),
        "allgather": allgather,
        "alltoall": alltoall,
        "reducescatter": reducescatter,
    }
    return Caller(dist.get_rank(), size, calls, dist.destroy_process_group)


def _mpi4py() -> Caller:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    size = world.Get_size()

    def received(tensor: torch.Tensor, elements: int) -> torch.Tensor:
        return tensor.new_empty(elements)

    calls: dict[str, Call] = {
        "allreduce": lambda tensor: world.Allreduce(MPI.IN_PLACE, tensor.numpy()),
        "broadcast": lambda tensor: world.Bcast(tensor.numpy()),
        "allgather": lambda tensor: world.Allgather(tensor.numpy(), received(tensor, size * len(tensor)).numpy()),
        "alltoall": lambda tensor: world.Alltoall(tensor.numpy(), received(tensor, len(tensor)).numpy()),
        "reducescatter": lambda tensor: world.Reduce_scatter_block(
            tensor.numpy(), received(tensor, len(tensor) // size).numpy()
        ),
    }
    return Caller(world.Get_rank(), size, calls, lambda: None)


def _dualdist(backend: str, transport: str) -> Caller:
    import dualdist as hvd

    hvd.init(backend=backend, transport=transport)
    calls: dict[str, Call] = {
        "allreduce": partial(hvd.allreduce_, op=hvd.Sum),
        "broadcast": partial(hvd.broadcast_, root_rank=0),
        "allgather": hvd.allgather,
        "alltoall": hvd.alltoall,
        "reducescatter": partial(hvd.reducescatter, op=hvd.Sum),
    }
    return Caller(hvd.rank(), hvd.size(), calls, hvd.shutdown)


def _horovod() -> Caller:
    import horovod.torch as horovod

    horovod.init()
    calls: dict[str, Call] = {
        "allreduce": partial(horovod.allreduce_, name="sum", op=horovod.Sum),
        "broadcast": partial(horovod.broadcast_, root_rank=0, name="copy"),
        "allgather": partial(horovod.allgather, name="gather"),
        "alltoall": partial(horovod.alltoall, name="exchange"),
        "reducescatter": partial(horovod.reducescatter, name="scatter", op=horovod.Sum),
    }
    return Caller(horovod.rank(), horovod.size(), calls, horovod.shutdown)


CALLERS: Mapping[str, Contestant[Caller]] = {
    "gloo": Contestant(_c10d),
    "mpi4py": Contestant(_mpi4py, ("mpi4py",), uses_mpi=True),
    "Horovod gloo": Contestant(_horovod, ("horovod",)),
    "Horovod mpi": Contestant(_horovod, ("horovod",), uses_mpi=True),
    "dualdist torch+gloo": Contestant(partial(_dualdist, "torch", "gloo")),
    "dualdist torch+mpi": Contestant(partial(_dualdist, "torch", "mpi"), ("mpi4py",), uses_mpi=True),
    "dualdist horovod+gloo": Contestant(partial(_dualdist, "horovod", "gloo"), ("horovod",)),
    "dualdist horovod+mpi": Contestant(partial(_dualdist, "horovod", "mpi"), ("horovod",), uses_mpi=True),
}
"""name -> the contestant."""
