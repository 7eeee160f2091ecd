"""The contestants that train: each joins its own world, and wraps a model as its documentation says."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from contestant import Contestant
from torch import nn

__all__ = ("TRAINERS", "Member", "Wrapped")


class Wrapped(NamedTuple):
    """A model that is ready to be trained."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    backward: Callable[[torch.Tensor], None]
    """Computes the averaged gradients of a loss."""


class Member(NamedTuple):
    """A process in a contestant's world."""

    rank: int
    wrap: Callable[[nn.Module, Any], Wrapped]
    """Takes a model and a communication hook, which is None for contestants without hooks."""
    leave: Callable[[], None]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _wrapped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
    return Wrapped(model, optimizer, lambda loss: loss.backward())


def _single() -> Member:
    return Member(0, lambda model, hook: _wrapped(model, _sgd(model)), lambda: None)


def _ddp() -> Member:
    import torch.distributed as dist

    def wrap(model: nn.Module, hook: Any) -> Wrapped:
        parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        if hook is not None:
            parallel.register_comm_hook(None, hook)
        return _wrapped(parallel, _sgd(model))

    dist.init_process_group("gloo")
    return Member(dist.get_rank(), wrap, dist.destroy_process_group)


def _dualdist(backend: str, transport: str, style: str) -> Member:
    import dualdist as hvd

    def optimizer(model: nn.Module, hook: Any) -> Wrapped:
        hvd.broadcast_parameters(model.state_dict(), 0)
        named = model.named_parameters()
        return _wrapped(model, hvd.DistributedOptimizer(_sgd(model), named_parameters=named, comm_hook=hook))

    def module(model: nn.Module, hook: Any) -> Wrapped:
        parallel = hvd.DistributedDataParallel(model)
        if hook is not None:
            parallel.register_comm_hook(None, hook)
        return _wrapped(parallel, _sgd(model))

    hvd.init(backend=backend, transport=transport)
    return Member(hvd.rank(), {"optimizer": optimizer, "module": module}[style], hvd.shutdown)


def _horovod() -> Member:
    import horovod.torch as horovod

    def wrap(model: nn.Module, hook: Any) -> Wrapped:
        horovod.broadcast_parameters(model.state_dict(), 0)
        return _wrapped(model, horovod.DistributedOptimizer(_sgd(model), named_parameters=model.named_parameters()))

    horovod.init()
    return Member(horovod.rank(), wrap, horovod.shutdown)


def _accelerate() -> Member:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)

    def wrap(model: nn.Module, hook: Any) -> Wrapped:
        prepared, optimizer = accelerator.prepare(model, _sgd(model))
        return Wrapped(prepared, optimizer, accelerator.backward)

    return Member(accelerator.process_index, wrap, accelerator.end_training)


def _ignite() -> Member:
    import ignite.distributed as idist

    def wrap(model: nn.Module, hook: Any) -> Wrapped:
        return _wrapped(idist.auto_model(model), idist.auto_optim(_sgd(model)))

    idist.initialize("gloo")
    return Member(idist.get_rank(), wrap, idist.finalize)


def _fabric() -> Member:
    from lightning.fabric import Fabric

    fabric: Any = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
    fabric.launch()

    def wrap(model: nn.Module, hook: Any) -> Wrapped:
        prepared, optimizer = fabric.setup(model, _sgd(model))
        return Wrapped(prepared, optimizer, fabric.backward)

    return Member(fabric.global_rank, wrap, lambda: None)


def _ours(backend: str, transport: str, *packages: str, uses_mpi: bool = False) -> dict[str, Contestant[Member]]:
    return {
        f"dualdist {backend}+{transport} {style}": Contestant(
            partial(_dualdist, backend, transport, style), packages, uses_mpi, takes_hooks=True
        )
        for style in ("optimizer", "module")
    }


TRAINERS: Mapping[str, Contestant[Member]] = {
    "single process": Contestant(_single, is_single=True),
    "DDP": Contestant(_ddp, takes_hooks=True),
    **_ours("torch", "gloo"),
    **_ours("torch", "mpi", "mpi4py", uses_mpi=True),
    **_ours("horovod", "gloo", "horovod"),
    **_ours("horovod", "mpi", "horovod", uses_mpi=True),
    "Horovod gloo": Contestant(_horovod, ("horovod",)),
    "Horovod mpi": Contestant(_horovod, ("horovod",), uses_mpi=True),
    "Accelerate": Contestant(_accelerate, ("accelerate",)),
    "ignite": Contestant(_ignite, ("ignite",)),
    "Fabric": Contestant(_fabric, ("lightning",)),
}
"""name -> the contestant."""
