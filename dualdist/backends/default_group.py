"""Torch's default process group, which programs that call torch.distributed find in every world.

Gloo connects all ranks at once. TORCH_GLOO_LAZY_INIT would save 1 ms with 2 ranks, and 5 ms with 8. But two ranks that
connect while one of them leaves the world may wait for minutes, or abort (torch 2.15).

Some functions of torch have the group as the default value of a parameter, if their module is imported after the group
was made; torch.distributed.algorithms.ddp_comm_hooks imports such a module. The functions would keep the group, and
with Gloo its connections, so that other ranks would wait for this one. In the next world they would use the old group.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import FunctionType

import torch
import torch.distributed as dist

from ..rendezvous import INTERFACE, check_interfaces, interface_of
from .torch_group import set_timeout

__all__ = ("DefaultGroup", "gloo_interface")

_MODULES = (
    "torch.distributed.nn.functional",
    "torch.distributed.optim.zero_redundancy_optimizer",
    "torch.distributed.fsdp.sharded_grad_scaler",
)
"""The modules of torch with such functions."""


def gloo_interface(address: str, env: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that make Gloo use the interface of `address`, except those that the user has set.

    By default, Gloo uses the address of the host's name, which other hosts may not reach (127.0.1.1 on Debian). NCCL
    finds the best connection between GPUs itself, so its variable is set only if the user chose an interface. Raises
    ConfigurationError if the user has chosen one for Gloo that this host does not have.
    """
    check_interfaces("GLOO_SOCKET_IFNAME", env)
    names = ["GLOO_SOCKET_IFNAME"] + ["NCCL_SOCKET_IFNAME"] * bool(env.get(INTERFACE))
    return {name: interface_of(address) for name in names if not env.get(name)}


class DefaultGroup:
    """The default group, if this world has made it."""

    def __init__(self) -> None:
        self._own: dist.ProcessGroup | None = None
        self._store: dist.Store | None = None

    def open(
        self,
        backend: str,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        device: torch.device | None = None,
    ) -> None:
        """Make the group, unless there is one. Collective. The arguments are those of init_process_group."""
        if dist.is_initialized():
            return
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device
        )
        self._own, self._store = dist.group.WORLD, store

    def set_timeout(self, store_timeout: timedelta, timeout: timedelta) -> None:
        """Set the timeouts of the group's store, and of its later collectives. Local."""
        if self._store is not None and self._own is not None:
            self._store.set_timeout(store_timeout)
            set_timeout(timeout, self._own)

    def close(self, end: Callable[[], None] = dist.destroy_process_group) -> None:
        """Destroy the group by `end`, unless the program has done it. Local."""
        own, self._own, self._store = self._own, None, None
        if own is not None and dist.is_initialized() and own is dist.group.WORLD:
            _forget(own)
            end()


def _forget(group: dist.ProcessGroup) -> None:
    """Let functions of torch use whatever is the default group when they are called. Local."""
    for function in _functions():
        values = function.__defaults__ or ()
        if any(value is group for value in values):
            function.__defaults__ = tuple(None if value is group else value for value in values)


def _functions() -> Iterator[FunctionType]:
    for module in [sys.modules[name] for name in _MODULES if name in sys.modules]:
        for thing in list(vars(module).values()):
            members = vars(thing).values() if inspect.isclass(thing) else [thing]
            yield from (member for member in members if inspect.isfunction(member))
