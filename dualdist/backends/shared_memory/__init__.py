"""Collectives of CPU tensors through memory that ranks of one host share, instead of the loopback network.

Members on one host need no network for tensors on the CPU. If there are several hosts or GPUs, `share_host` wraps the
Groups of another backend: reductions of CPU tensors use shared memory, and between hosts the network; everything else
uses the wrapped group.

memory.py has the memory, mesh.py the sockets by which members wait for each other, rounds.py the collectives of one
host, hierarchy.py those of several hosts, works.py their order and their threads, group.py the Groups, and sharing.py
makes them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..base import Exchange, Group
from .group import HierarchicalGroup, Hierarchy, HostGroup, Layout, ReducingGroup, SharingGroup
from .mesh import ADDRESS_BYTES, Memory, Mesh, box_bytes, make_memory
from .rounds import Rounds
from .works import Works

__all__ = ("HierarchicalGroup", "HostGroup", "ReducingGroup", "SharingGroup", "share_host")

# Connects the members of a host, and makes the groups that use the memory they share.

logger = logging.getLogger("dualdist")

_CONNECT_SECONDS = 30.0


def share_host(
    ranks: Sequence[int],
    rank: int,
    nodes: Sequence[str],
    exchange: Exchange,
    timeout: float,
    count: int,
    inners: Sequence[Group] = (),
    connect: Callable[[str, Sequence[int]], Group] | None = None,
    *,
    may_share: bool = True,
) -> list[SharingGroup]:
    """Return `count` groups over `ranks` that use shared memory. Collective over `ranks`.

    Args:
        rank: of this process, a member.
        nodes: the host of each rank of the world.
        exchange: of the members.
        timeout: seconds until a collective fails.
        inners: groups over `ranks`, which do what shared memory cannot do. Without them, all members are on one host,
            and the groups carry tensors on the CPU only.
        connect: connect(name, ranks) returns a group over `ranks`, collective over these alone.
        may_share: whether this process uses shared memory.

    The result is empty if no host has several members, if members are on several hosts but `connect` is None, or if
    memory cannot be shared on one of the members.
    """
    hosts = _by_node([nodes[member] for member in ranks])
    own = next(places for places in hosts if ranks.index(rank) in places)
    if len(hosts) == len(ranks) or (len(hosts) > 1 and connect is None):
        return []
    place, size = own.index(ranks.index(rank)), len(own)
    groups: list[SharingGroup] = []
    members = [ranks[member] for member in own]
    for number, shared in enumerate(_share_memory(members, place, own, exchange, timeout, count, may_share)):
        works = Works(shared.mesh, "dualdist-shared-memory", timeout)
        rounds = Rounds(shared.mesh, shared.memory, place, size)
        if not inners:
            groups.append(HostGroup(ranks, rank, shared.memory, rounds, works))
            continue
        if len(hosts) == 1 or connect is None:
            groups.append(ReducingGroup(inners[number], shared.memory, rounds, works))
            continue
        layout = Layout.of(hosts, box_bytes(max(map(len, hosts))))
        network = None
        if place < layout.num_slices:
            owners = sorted(ranks[places[place]] for places in hosts)
            network = connect(f"slice {place} of {shared.name}", owners)
        hierarchy = Hierarchy(shared.mesh, shared.memory, place, size, layout, network)
        groups.append(HierarchicalGroup(inners[number], shared.memory, hierarchy, works, network))
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
        names = [f"{answers[0].hex()}.{number}" for number in range(count)]
        return list(map(_Shared, names, meshes, memories))
    for mesh in meshes:
        mesh.close()
    if problem is not None:
        logger.warning("Ranks of one host use the network, because they cannot share memory: %s.", problem)
    return []
