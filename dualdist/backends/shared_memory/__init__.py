"""Collectives of CPU tensors through memory that ranks of one host share, instead of the loopback network.

If members are on several hosts, `share_host` wraps Groups that use the network: reductions use shared memory within
each host, and the network between hosts; everything else uses the wrapped group.

mesh.py has the memory, and the sockets by which members wait for each other, collectives.py the collectives of one
host, their order and their thread. Here are the Groups, with the reductions over several hosts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import NamedTuple

import torch

from ..base import Exchange, Group, Work
from .collectives import CollectiveQueue, CollectiveSteps, Rounds, combine_into
from .mesh import ADDRESS_BYTES, Memory, Mesh, box_bytes, make_memory

logger = logging.getLogger("dualdist")

# Allreduce of members on several hosts: in shared memory within a host, over the network between hosts.
#
# A tensor is reduced in chunks, and of each chunk the first members of every host own one slice each. An owner reduces
# its slice of the tensors of its host, and then reduces it with the owners of this slice on the other hosts. The other
# members of its host copy the result. NCCL and Horovod do the same between GPUs and hosts (Horovod:
# horovod/common/ops/nccl_operations.cc, NCCLHierarchicalAllreduce). A host sends 2 (h - 1) / h of the tensor with h
# hosts. A ring of all n members sends 2 (n - 1) / n of it from each host.
#
# Every slice needs an owner on every host. Therefore the host with the fewest members sets the number of slices.
#
# While the network carries some chunks, the members reduce the next one.

_CHUNK_BYTES = 4 << 20
"""With larger chunks the network waits for the members, with smaller ones more CPU time is used (2 hosts of 2 ranks,
1 Gbit/s, tensors of 2 to 32 MB)."""
_LEAST_SLICE_BYTES = 256 << 10
"""Smaller messages do not use the whole network."""
_CHUNKS_IN_FLIGHT = 2
"""How many chunks the network carries at most while the members reduce another one."""


class SliceLayout(NamedTuple):
    """How a tensor is divided. It is the same on all hosts."""

    chunk_bytes: int
    num_slices: int

    @classmethod
    def of(cls, hosts: Sequence[Sequence[int]], box_bytes: int) -> SliceLayout:
        """hosts: the members of each. box_bytes: on the host with most members, where the boxes are smallest."""
        chunk = min(_CHUNK_BYTES, box_bytes)
        return cls(chunk, max(1, min(min(map(len, hosts)), chunk // _LEAST_SLICE_BYTES)))

    def chunks(self, tensor: torch.Tensor) -> list[slice]:
        step, length = self.chunk_bytes // tensor.element_size(), len(tensor)
        return [slice(start, min(start + step, length)) for start in range(0, length, step)]

    def slices(self, chunk: slice) -> list[slice]:
        """Return the slice of each owner, in the order of their places on the host."""
        length, num = chunk.stop - chunk.start, self.num_slices
        bounds = [chunk.start + length * place // num for place in range(num + 1)]
        return [slice(*pair) for pair in pairwise(bounds)]


class Hierarchy(Rounds):
    """The allreduce of one member. Places are those on its host."""

    def __init__(
        self, mesh: Mesh, memory: Memory, place: int, size: int, layout: SliceLayout, network: Group | None
    ) -> None:
        """network: the owners of this member's slice on all hosts; None if it owns none."""
        super().__init__(mesh, memory, place, size)
        self._layout, self._network = layout, network

    def allreduce(self, tensor: torch.Tensor, op: int) -> CollectiveSteps:
        """Reduce `tensor` (1-D) in place, so that all members on all hosts have the same bits."""
        found = [tensor] if self._size == 1 else (yield from self._find_tensors(tensor))
        sent: deque[tuple[slice, Work | None]] = deque()
        for chunk in self._layout.chunks(tensor):
            own = self._own(chunk)
            if found:
                if own is not None:
                    combine_into(tensor[own], [other[own] for other in found], op)
            else:
                yield from self._reduce_in_boxes(tensor, chunk, own, op)
            sent.append((chunk, self._send(tensor, own, op)))
            if len(sent) > _CHUNKS_IN_FLIGHT:
                yield from self._finish(tensor, found, *sent.popleft())
        while sent:
            yield from self._finish(tensor, found, *sent.popleft())
        if found:
            yield from self._meet()  # from here on, the caller may change its tensor

    def _own(self, chunk: slice) -> slice | None:
        return self._layout.slices(chunk)[self._place] if self._network is not None else None

    def _reduce_in_boxes(
        self, tensor: torch.Tensor, chunk: slice, own: slice | None, op: int
    ) -> CollectiveSteps:
        """Reduce this member's slice of the tensors of its host."""
        part = tensor[chunk]
        boxes = self._of(part)
        boxes[self._place].copy_(part)
        yield from self._meet()
        if own is not None:
            inside = slice(own.start - chunk.start, own.stop - chunk.start)
            combine_into(tensor[own], [box[inside] for box in boxes], op)

    def _send(self, tensor: torch.Tensor, own: slice | None, op: int) -> Work | None:
        """Start reducing the slice with the other hosts."""
        if self._network is None or own is None or own.start == own.stop:
            return None
        return self._network.allreduce_(tensor[own], op)

    def _finish(
        self, tensor: torch.Tensor, found: Sequence[torch.Tensor], chunk: slice, work: Work | None
    ) -> CollectiveSteps:
        """Wait for the network, and copy the slices of the other owners."""
        if work is not None:
            yield work
            work.wait()
        slices = self._layout.slices(chunk)
        if found:
            yield from self._meet()
            for owner, part in self._others(slices):
                tensor[part].copy_(found[owner][part])
            return
        boxes = self._of(tensor[chunk])
        if self._network is not None:
            own = slices[self._place]
            boxes[self._place][own.start - chunk.start : own.stop - chunk.start].copy_(tensor[own])
        yield from self._meet()
        for owner, part in self._others(slices):
            tensor[part].copy_(boxes[owner][part.start - chunk.start : part.stop - chunk.start])


_SMALL_BYTES = 1 << 20
"""Up to this size, of the tensors of all members together, one round is faster than two."""


class HostGroup(Group):
    """Members of one host, for tensors on the CPU: all collectives use shared memory."""

    def __init__(
        self, ranks: Sequence[int], rank: int, memory: Memory, rounds: Rounds, queue: CollectiveQueue
    ) -> None:
        super().__init__(ranks, rank)
        self._memory, self._rounds, self._queue = memory, rounds, queue

    def wire_device(self, device: torch.device) -> torch.device:
        return torch.device("cpu")

    def zeros(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        shared = self._memory.zeros(length, dtype) if device.type == "cpu" else None
        return super().zeros(length, dtype, device) if shared is None else shared

    # `.data` has a version counter of its own: a collective is no in-place operation for autograd.

    def allreduce_(self, tensor: torch.Tensor, op: int, tag: str = "") -> Work:
        if tensor.nbytes * self.size <= _SMALL_BYTES:
            return self._queue.start(self._rounds.allreduce_small(tensor.data, op), at_once=True)
        return self._queue.start(self._rounds.allreduce(tensor.data, op))

    def broadcast_(self, tensor: torch.Tensor, root: int) -> Work:
        return self.broadcast_all_([tensor], root)

    def broadcast_all_(self, tensors: Iterable[torch.Tensor], root: int) -> Work:
        # At once: the others copy the first tensors while the root prepares the rest.
        return self._queue.start(
            self._rounds.broadcast((tensor.data for tensor in tensors), root), at_once=True
        )

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        steps = self._rounds.allgather(output.data, tensor.data)
        return self._queue.start(steps, at_once=output.nbytes <= _SMALL_BYTES)

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work:
        return self._queue.start(self._rounds.alltoall(output.data, tensor.data, received, sent))

    def set_timeout(self, timeout: timedelta) -> None:
        self._queue.timeout = timeout.total_seconds()

    def abort(self) -> None:
        self._queue.abort()

    def close(self) -> None:
        self._queue.close()

    def abandon(self) -> None:
        self._rounds.abandon()


class HierarchicalGroup(HostGroup):
    """Members of several hosts, for tensors on the CPU: reductions use shared memory within each host.

    Everything else goes over the network, in the wrapped group. With 2 hosts of 2 ranks, reductions were faster than
    those of the wrapped group at every size from 4 KB to 32 MB.
    """

    def __init__(
        self,
        inner: Group,
        memory: Memory,
        hierarchy: Hierarchy,
        queue: CollectiveQueue,
        network: Group | None,
    ) -> None:
        self._inner, self._network = inner, network
        super().__init__(inner.ranks, inner.ranks[inner.rank], memory, hierarchy, queue)

    @property
    def has_lost_member(self) -> Callable[[], bool]:
        return self._inner.has_lost_member

    @has_lost_member.setter
    def has_lost_member(self, ask: Callable[[], bool]) -> None:
        for group in self._wrapped():
            group.has_lost_member = ask

    def _wrapped(self) -> list[Group]:
        return [group for group in (self._inner, self._network) if group is not None]

    def allreduce_(self, tensor: torch.Tensor, op: int, tag: str = "") -> Work:
        return self._queue.start(self._rounds.allreduce(tensor.data, op))

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
        for group in self._wrapped():
            group.set_timeout(timeout)

    def abort(self) -> None:
        super().abort()
        self._inner.abort()

    def close(self) -> None:
        super().close()
        for group in self._wrapped():
            group.close()


# Connects the members of a host, and makes the groups that use the memory they share.

_CONNECT_SECONDS = 30.0
_NAME_BYTES = 8


def share_host(
    ranks: Sequence[int],
    rank: int,
    nodes: Sequence[str],
    exchange: Exchange,
    timeout: float,
    count: int,
    connect: Callable[[str, Sequence[int]], Group],
    *,
    may_share: bool = True,
) -> list[Group]:
    """Return `count` groups over `ranks` for tensors on the CPU, which use shared memory within each host.

    They use the network alone if no host has several members, or if memory cannot be shared on one of the members.
    Collective over `ranks`.

    Args:
        rank: of this process, a member.
        nodes: the host of each rank of the world.
        exchange: of the members.
        timeout: seconds until a collective fails.
        connect: connect(name, ranks) returns a group over `ranks` that uses the network, collective over these alone.
        may_share: whether this process uses shared memory.
    """
    hosts = _by_node([nodes[member] for member in ranks])
    own = next(places for places in hosts if ranks.index(rank) in places)
    place, size = own.index(ranks.index(rank)), len(own)
    shared: list[_Shared] = []
    if len(hosts) < len(ranks):
        shared = _share_memory(
            [ranks[member] for member in own], place, own, exchange, timeout, count, may_share
        )
    queues = [CollectiveQueue(mesh, timeout) for mesh, _ in shared]
    if shared and len(hosts) == 1:
        return [
            HostGroup(ranks, rank, memory, Rounds(mesh, memory, place, size), queue)
            for (mesh, memory), queue in zip(shared, queues, strict=True)
        ]
    name = exchange(secrets.token_bytes(_NAME_BYTES))[0].hex()
    inners = [connect(f"{name}.{number}", ranks) for number in range(count)]
    if not shared:
        return inners
    layout = SliceLayout.of(hosts, box_bytes(max(map(len, hosts))))
    groups: list[Group] = []
    for number, ((mesh, memory), queue, inner) in enumerate(zip(shared, queues, inners, strict=True)):
        network = None
        if place < layout.num_slices:
            owners = sorted(ranks[places[place]] for places in hosts)
            network = connect(f"slice {place} of {name}.{number}", owners)
        hierarchy = Hierarchy(mesh, memory, place, size, layout, network)
        groups.append(HierarchicalGroup(inner, memory, hierarchy, queue, network))
    return groups


def _by_node(nodes: Sequence[str]) -> list[list[int]]:
    """Return the members of each host, as places in the group."""
    hosts: dict[str, list[int]] = {}
    for place, node in enumerate(nodes):
        hosts.setdefault(node, []).append(place)
    return list(hosts.values())


class _Shared(NamedTuple):
    """What the members of a host share."""

    mesh: Mesh
    memory: Memory


def _share_memory(
    ranks: Sequence[int],
    place: int,
    own: Sequence[int],
    exchange: Exchange,
    timeout: float,
    count: int,
    may_share: bool,
) -> list[_Shared]:
    """Connect the members of this host, and map their memory, `count` times. Collective over all members.

    ranks: of this host. place: of this process among them. own: their places among all members.
    Returns an empty list on all members if that fails on any of them, or if `may_share` is false there.
    """
    meshes: list[Mesh] = []
    memories: list[Memory] = []
    descriptors: list[int] = []
    problem = None
    no_addresses = addresses = bytes(count * ADDRESS_BYTES)
    with contextlib.ExitStack() as stack:
        try:
            for _ in range(count if may_share else 0):
                meshes.append(Mesh(ranks, place, min(timeout, _CONNECT_SECONDS)))
                if place == 0:
                    descriptors.append(make_memory(len(ranks)))
                    stack.callback(os.close, descriptors[-1])
            addresses = b"".join(mesh.address for mesh in meshes) or no_addresses
        except OSError as error:
            problem = error
        answers = exchange(addresses)
        if no_addresses not in answers:
            try:
                for number, mesh in enumerate(meshes):
                    at = slice(number * ADDRESS_BYTES, (number + 1) * ADDRESS_BYTES)
                    made = descriptors[number] if place == 0 else None
                    descriptor = mesh.connect([answers[member][at] for member in own], made)
                    if made is None:
                        stack.callback(os.close, descriptor)
                    memories.append(Memory(descriptor, place, len(ranks)))
            except OSError as error:
                problem = error
    have_failed = b"\0" in exchange(bytes([len(memories) == count]))
    if not have_failed:
        return list(map(_Shared, meshes, memories))
    for mesh in meshes:
        mesh.close()
    if problem is not None:
        logger.warning("Ranks of one host use the network, because they cannot share memory: %s.", problem)
    return []
