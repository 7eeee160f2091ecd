"""Collectives of CPU tensors through memory that ranks of one host share, instead of the loopback network.

If members are on several hosts, `share_host` wraps Groups that use the network: reductions use shared memory within
each host, and the network between hosts; everything else uses the wrapped group.

mesh.py has the memory, and the sockets by which members wait for each other, rounds.py the collectives of one host,
collective_queue.py their order and their thread, and group.py the Groups, with the reductions over several hosts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..base import Exchange, Group
from .collective_queue import CollectiveQueue
from .group import HierarchicalGroup, Hierarchy, HostGroup, SliceLayout
from .mesh import ADDRESS_BYTES, Memory, Mesh, box_bytes, make_memory
from .rounds import Rounds

# Connects the members of a host, and makes the groups that use the memory they share.

logger = logging.getLogger("dualdist")

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
