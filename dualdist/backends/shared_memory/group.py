"""A Group whose members share memory, wrapped around the Group of another backend."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..base import Group, Work
from .hierarchy import Hierarchy, Layout
from .memory import Memory, box_bytes, make_memory
from .mesh import ADDRESS_BYTES, Mesh
from .rounds import Rounds
from .works import Works

__all__ = ("HierarchicalGroup", "HostGroup", "share_host")

logger = logging.getLogger("dualdist")

_CONNECT_SECONDS = 30.0
_SMALL_BYTES = 1 << 20
"""Up to this size, of the tensors of all members together, one round is faster than two."""


class HostGroup(Group):
    """Reduces tensors on the CPU in shared memory, and uses the wrapped group for everything else."""

    def __init__(self, inner: Group, memory: Memory, rounds: Rounds, works: Works) -> None:
        self.ranks, self.rank, self.size = inner.ranks, inner.rank, inner.size
        self.reduce_dtypes = inner.reduce_dtypes
        self._inner, self._memory, self._rounds, self._works = inner, memory, rounds, works

    @property
    def has_lost_member(self) -> Callable[[], bool]:
        return self._inner.has_lost_member

    @has_lost_member.setter
    def has_lost_member(self, ask: Callable[[], bool]) -> None:
        self._inner.has_lost_member = ask

    def wire_device(self, device: torch.device) -> torch.device:
        return self._inner.wire_device(device)

    def zeros(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        shared = self._memory.zeros(length, dtype) if device.type == "cpu" else None
        return super().zeros(length, dtype, device) if shared is None else shared

    # `.data` has a version counter of its own: a collective is no in-place operation for autograd.

    def allreduce_(self, tensor: torch.Tensor, op: int, tag: str = "") -> Work:
        if tensor.device.type != "cpu":
            return self._inner.allreduce_(tensor, op, tag)
        if tensor.nbytes * self.size <= _SMALL_BYTES:
            return self._works.begin(self._rounds.allreduce_small(tensor.data, op))
        return self._works.add(self._rounds.allreduce(tensor.data, op))

    def broadcast_(self, tensor: torch.Tensor, root: int) -> Work:
        return self._inner.broadcast_(tensor, root)

    def broadcast_all_(self, tensors: Sequence[torch.Tensor], root: int) -> Work:
        return self._inner.broadcast_all_(tensors, root)

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        return self._inner.allgather(output, tensor)

    def allgather_bytes(self, message: bytes) -> list[bytes]:
        return self._inner.allgather_bytes(message)

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work:
        return self._inner.alltoall(output, tensor, received, sent)

    def set_timeout(self, seconds: float) -> None:
        """Set how long a collective waits for another member. Local."""
        self._works.timeout = seconds

    def abort(self) -> None:
        self._works.abort()
        self._inner.abort()

    def close(self) -> None:
        self._works.close()
        self._inner.close()

    def abandon(self) -> None:
        """In a forked process, close its copies of the sockets. Local."""
        self._works.abandon()


class HierarchicalGroup(HostGroup):
    """Reduces tensors on the CPU in shared memory within each host, and over the network between hosts.

    With 2 hosts of 2 ranks, that was faster than the wrapped group at every size from 4 KB to 32 MB.
    """

    def __init__(
        self, inner: Group, memory: Memory, hierarchy: Hierarchy, works: Works, network: Group | None
    ) -> None:
        super().__init__(inner, memory, hierarchy, works)
        self._network = network
        if network is not None:
            network.has_lost_member = lambda: inner.has_lost_member()

    def allreduce_(self, tensor: torch.Tensor, op: int, tag: str = "") -> Work:
        if tensor.device.type != "cpu":
            return self._inner.allreduce_(tensor, op, tag)
        return self._works.add(self._rounds.allreduce(tensor.data, op))

    def close(self) -> None:
        super().close()
        if self._network is not None:
            self._network.close()


def share_host(
    inners: Sequence[Group],
    nodes: Sequence[str],
    timeout: float,
    connect: Callable[[str, Sequence[int]], Group] | None = None,
) -> list[HostGroup]:
    """Return a group that uses shared memory for each of `inners`, which have the same members. Collective.

    nodes: the host of each rank of the world. timeout: seconds until a collective fails. connect(name, ranks): returns
    a group over `ranks`, collective over these alone. The result is empty if no host has several members, if members
    are on several hosts but `connect` is None, or if memory cannot be shared.
    """
    first = inners[0]
    if first.rank < 0 or first.size < 2:
        return []
    hosts = _by_node([nodes[rank] for rank in first.ranks])
    own = next(places for places in hosts if first.rank in places)
    if len(hosts) == first.size or (len(hosts) > 1 and connect is None):
        return []
    place, size = own.index(first.rank), len(own)
    groups: list[HostGroup] = []
    shared_memory = _share_memory(first, own, len(inners), timeout)
    for inner, shared in zip(inners, shared_memory, strict=False):  # it may be empty
        works = Works(shared.mesh, "dualdist-shared-memory", timeout)
        if len(hosts) == 1 or connect is None:
            rounds = Rounds(shared.mesh, shared.memory, place, size)
            groups.append(HostGroup(inner, shared.memory, rounds, works))
            continue
        layout = Layout.of(hosts, box_bytes(max(map(len, hosts))))
        network = None
        if place < layout.num_slices:
            owners = sorted(inner.ranks[places[place]] for places in hosts)
            network = connect(f"slice {place} of {shared.name}", owners)
        hierarchy = Hierarchy(shared.mesh, shared.memory, place, size, layout, network)
        groups.append(HierarchicalGroup(inner, shared.memory, hierarchy, works, network))
    return groups


def _by_node(nodes: Sequence[str]) -> list[list[int]]:
    """Return the members of each host, as places in the group."""
    hosts: dict[str, list[int]] = {}
    for place, node in enumerate(nodes):
        hosts.setdefault(node, []).append(place)
    return list(hosts.values())


class _Shared(NamedTuple):
    """What the members of a host share."""

    name: str
    """The same on all members of the group, on all hosts, and used once."""
    mesh: Mesh
    memory: Memory


def _share_memory(inner: Group, own: Sequence[int], count: int, timeout: float) -> list[_Shared]:
    """Connect the members `own` of this host, and map their memory, `count` times. Collective over `inner`.

    Returns an empty list on all members if that fails on any of them.
    """
    ranks, place, size = [inner.ranks[member] for member in own], own.index(inner.rank), len(own)
    meshes: list[Mesh] = []
    memories: list[Memory] = []
    descriptors: list[int] = []
    problem = None
    no_addresses = addresses = bytes(count * ADDRESS_BYTES)
    with contextlib.ExitStack() as stack:
        try:
            for _ in range(count):
                meshes.append(Mesh(ranks, place, min(timeout, _CONNECT_SECONDS)))
                if place == 0:
                    descriptors.append(make_memory(size))
                    stack.callback(os.close, descriptors[-1])
            addresses = b"".join(mesh.address for mesh in meshes)
        except OSError as error:
            problem = error
        answers = inner.allgather_bytes(addresses)
        if no_addresses not in answers:
            try:
                for number, mesh in enumerate(meshes):
                    at = slice(number * ADDRESS_BYTES, (number + 1) * ADDRESS_BYTES)
                    made = descriptors[number] if place == 0 else None
                    descriptor = mesh.connect([answers[member][at] for member in own], made)
                    if made is None:
                        stack.callback(os.close, descriptor)
                    memories.append(Memory(descriptor, place, size))
            except OSError as error:
                problem = error
    have_failed = b"\0" in inner.allgather_bytes(bytes([len(memories) == count]))
    if not have_failed:
        names = [f"{answers[0].hex()}.{number}" for number in range(count)]
        return list(map(_Shared, names, meshes, memories))
    for mesh in meshes:
        mesh.close()
    if problem is not None:
        logger.warning("Ranks of one host use the network, because they cannot share memory: %s.", problem)
    return []
