"""Collectives of CPU tensors through memory that ranks of one host share, instead of the loopback network.

If members are on several hosts, `share_host` wraps Groups that use the network: reductions use shared memory within
each host, and the network between hosts; everything else uses the wrapped group.

mesh.py has the memory, and the sockets by which members wait for each other, collectives.py the collectives, their
order and their thread. Here are the Groups.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

import torch

from ..core.backends.base import Exchange, Group, Work, plain
from ..core.backends.torch_groups import connected
from ..core.launch import is_on
from ..core.meeting.links import Address, Listener
from ..errors import HorovodInternalError, logger
from .collectives import CollectiveQueue, Rounds
from .mesh import Memory, Mesh, box_bytes, make_memory

_SMALL_BYTES = 1 << 20
"""Up to this size, of the tensors of all members together, one round is faster than two."""


class HostGroup(Group):
    """Members of one host, for tensors on the CPU: all collectives use shared memory."""

    def __init__(self, ranks: Sequence[int], rank: int, rounds: Rounds, timeout: float) -> None:
        super().__init__(ranks, rank)
        self._rounds, self._queue = rounds, CollectiveQueue(rounds.mesh, timeout)

    def wire_device(self, device: torch.device) -> torch.device:
        return torch.device("cpu")

    def zeros(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        shared = self._rounds.memory.zeros(length, dtype) if device.type == "cpu" else None
        return super().zeros(length, dtype, device) if shared is None else shared

    def allreduce_(self, tensor: torch.Tensor, op: int, tag: str = "") -> Work:
        if tensor.nbytes * self.size <= _SMALL_BYTES:
            return self._queue.start(self._rounds.allreduce_small(plain(tensor), op), at_once=True)
        return self._queue.start(self._rounds.allreduce(plain(tensor), op))

    def broadcast_(self, tensor: torch.Tensor, root: int) -> Work:
        return self.broadcast_all_([tensor], root)

    def broadcast_all_(self, tensors: Iterable[torch.Tensor], root: int) -> Work:
        # At once: the others copy the first tensors while the root prepares the rest.
        return self._queue.start(self._rounds.broadcast((plain(tensor) for tensor in tensors), root), at_once=True)

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        steps = self._rounds.allgather(plain(output), plain(tensor))
        return self._queue.start(steps, at_once=output.nbytes <= _SMALL_BYTES)

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work:
        return self._queue.start(self._rounds.alltoall(plain(output), plain(tensor), received, sent))

    def set_timeout(self, timeout: timedelta) -> None:
        self._queue.timeout = timeout.total_seconds()

    def abort(self) -> None:
        self._queue.abort()

    def close(self) -> None:
        self._queue.close()

    def abandon(self) -> None:
        self._rounds.mesh.abandon()


class HierarchicalGroup(HostGroup):
    """Members of several hosts, for tensors on the CPU: reductions use shared memory within each host.

    Everything else goes over the network, in the wrapped group. With 2 hosts of 2 ranks, reductions were faster than
    those of the wrapped group at every size from 4 KB to 32 MB.
    """

    def __init__(self, inner: Group, rounds: Rounds, timeout: float) -> None:
        self._inner = inner
        self._wrapped = [inner] if rounds.network is None else [inner, rounds.network]
        super().__init__(inner.ranks, inner.ranks[inner.rank], rounds, timeout)

    @property
    def has_lost_member(self) -> Callable[[], bool]:
        return self._inner.has_lost_member

    @has_lost_member.setter
    def has_lost_member(self, ask: Callable[[], bool]) -> None:
        for group in self._wrapped:
            group.has_lost_member = ask

    def allreduce_(self, tensor: torch.Tensor, op: int, tag: str = "") -> Work:
        return self._queue.start(self._rounds.allreduce(plain(tensor), op))

    def broadcast_(self, tensor: torch.Tensor, root: int) -> Work:
        return self._inner.broadcast_(tensor, root)

    def broadcast_all_(self, tensors: Iterable[torch.Tensor], root: int) -> Work:
        return self._inner.broadcast_all_(tensors, root)

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        return self._inner.allgather(output, tensor)

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work:
        return self._inner.alltoall(output, tensor, received, sent)

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        for group in self._wrapped:
            group.set_timeout(timeout)

    def abort(self) -> None:
        super().abort()
        self._inner.abort()

    def close(self) -> None:
        super().close()
        for group in self._wrapped:
            group.close()


# Connects the members of a host, and makes the groups that use the memory they share.

_CONNECT_SECONDS = 30.0
_CHUNK_BYTES = 4 << 20
"""With larger chunks the network waits for the members, with smaller ones more CPU time is used (2 hosts of 2 ranks,
1 Gbit/s, tensors of 2 to 32 MB)."""
_LEAST_SHARE_BYTES = 256 << 10
"""Smaller messages do not use the whole network."""


def share_host(
    ranks: Sequence[int],
    rank: int,
    nodes: Sequence[str],
    exchange: Exchange,
    timeout: float,
    count: int,
    connect: Callable[[str, Sequence[int]], Group],
    env: Mapping[str, str],
) -> list[Group]:
    """Return `count` groups over `ranks` for tensors on the CPU, which use shared memory within each host.

    They use the network alone if no host has several members, or a member cannot share memory. Collective over `ranks`.

    Args:
        rank: of this process, a member.
        nodes: the host of each rank of the world.
        exchange: of the members.
        timeout: seconds until a collective fails.
        connect: connect(name, ranks) returns a group over `ranks` that uses the network, collective over these alone.
        env: with DUALDIST_SHARED_MEMORY, which says whether this process uses shared memory.
    """
    hosts: dict[str, list[int]] = {}
    for member in ranks:
        hosts.setdefault(nodes[member], []).append(member)
    neighbours = hosts[nodes[rank]]
    place = neighbours.index(rank)
    shared: list[tuple[Mesh, Memory]] = []
    if len(hosts) < len(ranks):
        is_wanted = is_on(env, "DUALDIST_SHARED_MEMORY", True)
        shared = _share_memory(ranks, neighbours, place, exchange, timeout, count, is_wanted)
    if shared and len(hosts) == 1:
        return [HostGroup(ranks, rank, Rounds(*one), timeout) for one in shared]
    name, inners = connected(ranks, exchange, count, connect)
    if not shared:
        return inners
    numbers = [len(members) for members in hosts.values()]
    chunk_bytes = min(_CHUNK_BYTES, box_bytes(max(numbers)))  # more members have smaller boxes
    num_owners = max(1, min(*numbers, chunk_bytes // _LEAST_SHARE_BYTES))
    groups: list[Group] = []
    for number, (one, inner) in enumerate(zip(shared, inners, strict=True)):
        network = None
        if place < num_owners:
            owners = sorted(members[place] for members in hosts.values())
            network = connect(f"share {place} of {name}.{number}", owners)
        groups.append(HierarchicalGroup(inner, Rounds(*one, chunk_bytes, num_owners, network), timeout))
    return groups


def _share_memory(
    ranks: Sequence[int],
    on_host: Sequence[int],
    place: int,
    exchange: Exchange,
    timeout: float,
    count: int,
    is_wanted: bool,
) -> list[tuple[Mesh, Memory]]:
    """Connect the members of this host, and map their memory, `count` times. Collective over all members.

    on_host: the ranks of this host, of which this one is at `place`.
    Returns an empty list on all members if that fails on any of them, or if `is_wanted` is false there.
    """
    size, seconds = len(on_host), min(timeout, _CONNECT_SECONDS)
    shared: list[tuple[Mesh, Memory]] = []
    descriptors: list[int] = []
    own, problem = b"", ""
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as undo:
        try:
            if is_wanted:
                listener = stack.enter_context(contextlib.closing(Listener()))
                for _ in range(count if place == 0 else 0):
                    descriptors.append(make_memory(size))
                    stack.callback(os.close, descriptors[-1])
                own = json.dumps(listener.address).encode()
        except OSError as error:
            problem = f"{error}"
        answers = exchange(own)
        try:
            for number in range(0 if b"" in answers else count):
                addresses = [Address(*json.loads(answers[ranks.index(one)])) for one in on_host]
                mesh = undo.enter_context(contextlib.closing(Mesh(on_host, on_host[place])))
                mesh.connect(listener, addresses, f"{number}", seconds)
                descriptor = mesh.pass_on(descriptors[number] if place == 0 else None, seconds)
                if place > 0:
                    stack.callback(os.close, descriptor)
                shared.append((mesh, Memory(descriptor, place, size)))
        except (OSError, HorovodInternalError) as error:
            problem = f"{error}"
        stack.close()  # the listener first: a member that still connects to it fails at once
        if b"\0" not in exchange(bytes([len(shared) == count])):
            undo.pop_all()
            return shared
    if problem:
        logger.warning("Ranks of one host use the network, because they cannot share memory: %s.", problem)
    return []
