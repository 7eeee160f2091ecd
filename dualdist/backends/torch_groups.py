"""Makes the groups of a world on torch.distributed, and keeps them."""

from __future__ import annotations

import inspect
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any, cast

import torch
import torch.distributed as dist

from ..meeting import INTERFACE, check_interfaces, interface_of
from .base import Exchange, Group
from .shared_memory import SharingGroup, share_host
from .torch_group import TorchGroup, set_timeout, wrapped
from .torch_interface import carried_types, transport_timeout

# Process groups that their members make without the other ranks, and without torch.distributed's list of groups.
#
# torch.distributed.new_group names such a group after the number of groups that the process has made. The members of a
# group would use different names if they have made different numbers of groups.

_KINDS = ("gloo", "mpi4py")


def can_connect(config: Mapping[str, str]) -> bool:
    """Return whether DirectGroup supports the transport of CPU tensors in `config`."""
    return config["cpu"] in _KINDS


class DirectGroup(TorchGroup):
    """A group for tensors on the CPU."""

    def __init__(
        self, kind: str, store: dist.Store, name: str, ranks: Sequence[int], rank: int, timeout: timedelta
    ) -> None:
        """Connect the members. Collective over `ranks` alone.

        store: shared by the members. name: the same on all members, and used once.
        """
        place, own_store = list(ranks).index(rank), dist.PrefixStore(name, store)
        with wrapped():
            own = (
                dist.ProcessGroupGloo(own_store, place, len(ranks), timeout)
                if kind == "gloo"
                else _mpi_group(own_store, name, place, len(ranks), timeout)
            )
        super().__init__(ranks, rank, own, frozenset({"cpu"}), None)

    def set_timeout(self, timeout: timedelta) -> None:
        if self._pg is not None:
            # Gloo has only the private method in older releases of torch.
            setter = getattr(self._pg, "set_timeout", None) or self._pg._set_default_timeout
            setter(timeout)

    def close(self) -> None:
        pg, self._pg = self._pg, None
        if pg is not None:
            pg.shutdown()


def _mpi_group(store: dist.Store, name: str, place: int, size: int, timeout: timedelta) -> Any:
    from . import mpi

    options = cast(Any, torch._C._distributed_c10d)._DistributedBackendOptions()
    options.store, options.group_id, options.timeout = store, name, timeout
    options.group_rank, options.group_size = place, size
    return mpi.create(options)


# Torch's default process group, which programs that call torch.distributed find in every world.
#
# Gloo connects all ranks at once. TORCH_GLOO_LAZY_INIT would save 1 ms with 2 ranks, and 5 ms with 8. But two ranks
# that connect while one of them leaves the world may wait for minutes, or abort (torch 2.15).
#
# Some functions of torch have the group as the default value of a parameter, if their module is imported after the
# group was made; torch.distributed.algorithms.ddp_comm_hooks imports such a module. The functions would keep the group,
# and with Gloo its connections, so that other ranks would wait for this one. In the next world they would use the old
# group.

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


_members_groups_made: Counter[tuple[int, ...]] = Counter()
"""How many groups this process has made among the members alone, for each tuple of ranks."""
_FIRST_MEMBERS_GROUP = 1_000_000
"""Above the numbers of all groups that all ranks make together."""
_NAME_BYTES = 8


def config_text(config: Mapping[str, str]) -> str:
    """Return `config` as torch's argument `backend`."""
    return ",".join(f"{kind}:{name}" for kind, name in config.items()) if len(config) > 1 else config["cpu"]


class TorchGroups:
    """The groups of one world."""

    def __init__(
        self,
        rank: int,
        config: Mapping[str, str],
        device: torch.device | None,
        nodes: Sequence[str],
        store: dist.Store,
        timeout: timedelta,
        *,
        may_share: bool,
    ) -> None:
        """config: which of torch's backends carries the tensors of which device. device: to which it is bound.

        nodes: the host of each rank. timeout: of collectives. may_share: whether this rank uses shared memory.
        """
        self._rank, self._config, self._device, self._nodes = rank, config, device, nodes
        self._store, self._timeout, self._may_share = store, timeout, may_share
        self._groups: list[TorchGroup] = []
        self._direct_groups: list[DirectGroup] = []
        self._sharing_groups: list[SharingGroup] = []

    def make(self, ranks: Sequence[int], count: int, exchange: Exchange) -> list[Group]:
        """Return `count` groups over `ranks`. Collective over the world. exchange: of `ranks`."""
        return self._make(ranks, count, exchange, self._make_group)

    def make_among_members(self, ranks: Sequence[int], count: int, exchange: Exchange) -> list[Group]:
        """Do the same. Collective over `ranks` alone."""
        return self._make(ranks, count, exchange, self._make_members_group)

    def _make(
        self,
        ranks: Sequence[int],
        count: int,
        exchange: Exchange,
        make: Callable[[Sequence[int]], TorchGroup],
    ) -> list[Group]:
        if [*self._config] == ["cpu"] and can_connect(self._config):
            return self._make_direct(ranks, count, exchange)
        own = [make(ranks) for _ in range(count)]
        self._groups += own
        return [*((self._rank in ranks and self._share_host(ranks, count, exchange, own)) or own)]

    def _make_direct(self, ranks: Sequence[int], count: int, exchange: Exchange) -> list[Group]:
        """Make groups without torch's default group, on one host also without connections. Collective over `ranks`."""
        if self._rank not in ranks:
            return [self._group(ranks, None) for _ in range(count)]
        is_one_host = len(ranks) > 1 and len({self._nodes[rank] for rank in ranks}) == 1
        if is_one_host and (shared := self._share_host(ranks, count, exchange)):
            return [*shared]
        name = exchange(secrets.token_bytes(_NAME_BYTES))[0].hex()
        own = [self._connect(f"{name}.{number}", ranks) for number in range(count)]
        return own if is_one_host else [*(self._share_host(ranks, count, exchange, own) or own)]

    def _make_group(self, ranks: Sequence[int], among_members: bool = False) -> TorchGroup:
        with wrapped():
            process_group = dist.new_group(
                list(ranks),
                backend=config_text(self._config),
                timeout=transport_timeout(self._timeout, self._device),
                use_local_synchronization=among_members,
            )
        return self._group(ranks, process_group if self._rank in ranks else None)

    def _make_members_group(self, ranks: Sequence[int]) -> TorchGroup:
        # torch numbers the groups of a process, and names each by its number. Other ranks do not count this one.
        torch_world, key = dist.distributed_c10d._world, tuple(ranks)
        before = torch_world.group_count
        _members_groups_made[key] += 1
        torch_world.group_count = _FIRST_MEMBERS_GROUP + _members_groups_made[key]
        try:
            return self._make_group(ranks, among_members=True)
        finally:
            torch_world.group_count = before

    def _group(self, ranks: Sequence[int], process_group: Any) -> TorchGroup:
        return TorchGroup(ranks, self._rank, process_group, carried_types(self._config), self._device)

    def _share_host(
        self, ranks: Sequence[int], count: int, exchange: Exchange, inners: Sequence[Group] = ()
    ) -> list[SharingGroup]:
        """Return groups that use shared memory; none if a member has none. Collective over `ranks`."""
        shared = share_host(
            ranks,
            self._rank,
            self._nodes,
            exchange,
            self._timeout.total_seconds(),
            count,
            inners,
            self._connect if can_connect(self._config) else None,
            may_share=self._may_share,
        )
        self._sharing_groups += shared
        return shared

    def _connect(self, name: str, ranks: Sequence[int]) -> Group:
        """Return a group over `ranks`, for tensors on the CPU. Collective over `ranks` alone."""
        kind, store = self._config["cpu"], self._store.clone()
        self._direct_groups.append(DirectGroup(kind, store, name, ranks, self._rank, self._timeout))
        return self._direct_groups[-1]

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later collectives. Local."""
        self._timeout = timeout
        for group in self._groups:
            group.set_timeout(transport_timeout(timeout, self._device))
        for direct_group in self._direct_groups:
            direct_group.set_timeout(timeout)
        for sharing_group in self._sharing_groups:
            sharing_group.set_timeout(timeout.total_seconds())

    @property
    def are_aborted(self) -> bool:
        """Whether a group was aborted after a failure."""
        return any(group.is_aborted for group in self._groups)

    def close(self) -> None:
        """Destroy the groups of torch.distributed. Local."""
        for group in self._groups:
            group.close()

    def abandon(self) -> None:
        """In a forked process, close its copies of the sockets. Local."""
        for group in self._sharing_groups:
            group.abandon()
