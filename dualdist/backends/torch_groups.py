"""Makes the groups of a world on torch.distributed, and keeps them."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .base import Exchange, Group
from .direct_group import DirectGroup, can_connect
from .shared_memory import SharingGroup, share_host
from .torch_devices import carried_types, transport_timeout
from .torch_group import TorchGroup, wrapped

__all__ = ("TorchGroups", "config_text")

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
