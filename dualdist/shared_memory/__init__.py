"""Collectives of CPU tensors through memory that ranks of one host share, instead of the loopback network.

If members are on several hosts, `share_host` wraps Groups that use the network: reductions use shared memory within
each host, and the network between hosts; everything else uses the wrapped group.

mesh.py has the memory, and the sockets by which members wait for each other, collectives.py the collectives of one
host, their order and their thread. Here are the Groups, with the reductions over several hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

import torch

from ..core.backends.base import Exchange, Group, Work, plain
from ..core.backends.torch_groups import connected
from ..core.launch import is_on
from ..core.meeting.links import Address, Listener
from ..errors import HorovodInternalError, logger
from .collectives import CollectiveQueue, CollectiveSteps, Rounds
from .mesh import Memory, Mesh, box_bytes, make_memory

# Allreduce of members on several hosts: in shared memory within a host, over the network between hosts.
#
# A tensor is reduced in chunks, and of each chunk the first members of every host own one share each. An owner reduces
# its share of the tensors of its host, and then reduces it with the owners of this share on the other hosts. The other
# members of its host copy the result. NCCL and Horovod do the same between GPUs and hosts (Horovod:
# horovod/common/ops/nccl_operations.cc, NCCLHierarchicalAllreduce). A host sends 2 (h - 1) / h of the tensor with h
# hosts. A ring of all n members sends 2 (n - 1) / n of it from each host.
#
# Every share needs an owner on every host. Therefore the host with the fewest members sets the number of shares.
#
# While the network carries some chunks, the members reduce the next one.

_CHUNK_BYTES = 4 << 20
"""With larger chunks the network waits for the members, with smaller ones more CPU time is used (2 hosts of 2 ranks,
1 Gbit/s, tensors of 2 to 32 MB)."""
_LEAST_SHARE_BYTES = 256 << 10
"""Smaller messages do not use the whole network."""
_CHUNKS_IN_FLIGHT = 2
"""How many chunks the network carries at most while the members reduce another one."""


class Hierarchy(Rounds):
    """The rounds of a member whose group is on several hosts. Places are those on its host."""

    def __init__(self, mesh: Mesh, memory: Memory, num_owners: int, chunk_bytes: int, network: Group | None) -> None:
        """num_owners, chunk_bytes: the same on all hosts. A chunk fits a box.

        network: the owners of this member's share on all hosts; None if it owns none.
        """
        super().__init__(mesh, memory)
        self._num_owners, self._chunk_bytes, self.network = num_owners, chunk_bytes, network

    def allreduce(self, tensor: torch.Tensor, op: int) -> CollectiveSteps:
        """Reduce `tensor` (1-D) in place, so that all members on all hosts have the same bits."""
        found = [tensor] if self._size == 1 else (yield from self._find_tensors(tensor))
        length = self._chunk_bytes // tensor.element_size()
        sent: deque[tuple[torch.Tensor, list[torch.Tensor], Work | None]] = deque()
        for chunk, *chunks in zip(*[one.split(length) for one in (tensor, *found)], strict=True):
            yield from self._reduce_share(chunk, chunks, op)
            sent.append((chunk, chunks, self._send(chunk, op)))
            if len(sent) > _CHUNKS_IN_FLIGHT:
                yield from self._finish(*sent.popleft())
        while sent:
            yield from self._finish(*sent.popleft())
        if found:
            yield from self._meet()  # from here on, the caller may change its tensor

    def _send(self, chunk: torch.Tensor, op: int) -> Work | None:
        """Start reducing this member's share with the other hosts."""
        own = self._own_share(chunk)
        if self.network is None or own is None or own.start == own.stop:
            return None
        return self.network.allreduce_(chunk[own], op)

    def _finish(self, chunk: torch.Tensor, found: Sequence[torch.Tensor], work: Work | None) -> CollectiveSteps:
        """Wait for the network, and copy the shares of the other owners."""
        if work is not None:
            yield work
            work.wait()
        yield from self._copy_shares(chunk, found)


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

    def __init__(self, inner: Group, hierarchy: Hierarchy, timeout: float) -> None:
        self._inner = inner
        self._wrapped = [inner] if hierarchy.network is None else [inner, hierarchy.network]
        super().__init__(inner.ranks, inner.ranks[inner.rank], hierarchy, timeout)

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

    def allgather_bytes(self, message: bytes) -> list[bytes]:
        return self._inner.allgather_bytes(message)

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
    shared: list[tuple[Mesh, Memory]] = []
    if len(hosts) < len(ranks):
        may_share = is_on(env, "DUALDIST_SHARED_MEMORY", True)
        shared = _share_memory(ranks, rank, neighbours, exchange, timeout, count, may_share)
    if shared and len(hosts) == 1:
        return [HostGroup(ranks, rank, Rounds(*one), timeout) for one in shared]
    name, inners = connected(ranks, exchange, count, connect)
    if not shared:
        return inners
    numbers = [len(members) for members in hosts.values()]
    chunk_bytes = min(_CHUNK_BYTES, box_bytes(max(numbers)))  # more members have smaller boxes
    num_owners = max(1, min(*numbers, chunk_bytes // _LEAST_SHARE_BYTES))
    place = neighbours.index(rank)
    groups: list[Group] = []
    for number, (one, inner) in enumerate(zip(shared, inners, strict=True)):
        network = None
        if place < num_owners:
            owners = sorted(members[place] for members in hosts.values())
            network = connect(f"share {place} of {name}.{number}", owners)
        hierarchy = Hierarchy(*one, num_owners, chunk_bytes, network)
        groups.append(HierarchicalGroup(inner, hierarchy, timeout))
    return groups


def _share_memory(
    ranks: Sequence[int],
    rank: int,
    neighbours: Sequence[int],
    exchange: Exchange,
    timeout: float,
    count: int,
    may_share: bool,
) -> list[tuple[Mesh, Memory]]:
    """Connect the members of this host, and map their memory, `count` times. Collective over all members.

    neighbours: the ranks of this host, with this one.
    Returns an empty list on all members if that fails on any of them, or if `may_share` is false there.
    """
    place, size = neighbours.index(rank), len(neighbours)
    meshes: list[Mesh] = []
    memories: list[Memory] = []
    descriptors: list[int] = []
    problem: Exception | None = None
    with contextlib.ExitStack() as stack:
        own = b""
        try:
            if may_share:
                listener = stack.enter_context(contextlib.closing(Listener()))
                for _ in range(count if place == 0 else 0):
                    descriptors.append(make_memory(size))
                    stack.callback(os.close, descriptors[-1])
                own = json.dumps(listener.address).encode()
        except OSError as error:
            problem = error
        answers = exchange(own)
        if b"" not in answers:
            try:
                addresses = [Address(*json.loads(answers[ranks.index(one)])) for one in neighbours]
                seconds = min(timeout, _CONNECT_SECONDS)
                for number in range(count):
                    meshes.append(Mesh(neighbours, rank))
                    meshes[-1].connect(listener, addresses, f"{number}", seconds)
                    made = descriptors[number] if place == 0 else None
                    descriptor = meshes[-1].pass_on(made, seconds)
                    if made is None:
                        stack.callback(os.close, descriptor)
                    memories.append(Memory(descriptor, place, size))
            except (OSError, HorovodInternalError) as error:
                problem = error
    have_failed = b"\0" in exchange(bytes([len(memories) == count]))
    if not have_failed:
        return list(zip(meshes, memories, strict=True))
    for mesh in meshes:
        mesh.close()
    if problem is not None:
        logger.warning("Ranks of one host use the network, because they cannot share memory: %s.", problem)
    return []
