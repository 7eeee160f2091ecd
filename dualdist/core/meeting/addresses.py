"""Finds the addresses of a host that other hosts can reach. Only an attempt to connect shows this.

A host may have several networks, of which some connect to no other host (a container bridge has the same address on
every host), and its name may resolve to 127.0.1.1, as on Debian. Therefore rank 0 listens on all its addresses for a
moment, and one process of every other host connects to each. The first address that all of them reach is used. The
address of each other host is the one from which it connected.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from .server import MeetingServer, reach

Gather = Callable[[str], list[str]]
"""Sends this process's text; returns every process's text in rank order. Collective over the launched processes."""

# The network interfaces of this host and their addresses. DUALDIST_INTERFACE can select some of them.
#
# Only IPv4, as in Horovod and in Gloo's own choice. The ioctl requests are specific to Linux, see netdevice(7).

LOOPBACK = "127.0.0.1"
INTERFACE = "DUALDIST_INTERFACE"
_SIOCGIFADDR = 0x8915


def addresses() -> dict[str, str]:
    """Return the IPv4 address of every network interface that has one, by the interface's name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def candidates(env: Mapping[str, str]) -> list[str]:
    """Return the addresses at which other hosts may reach this one, in the order in which to try them.

    DUALDIST_INTERFACE selects interfaces by their names, separated by commas; names that do not exist here
    are skipped. Raises ConfigurationError when it names no interface of this host.
    """
    found = addresses()
    wanted = [name.strip() for name in env.get(INTERFACE, "").split(",") if name.strip()]
    if wanted:
        chosen = [found[name] for name in wanted if name in found]
        if not chosen:
            raise ConfigurationError(
                f"`{INTERFACE}` must name a network interface of {socket.gethostname()} that has an IPv4 address "
                f"({', '.join(found)}), but is {env[INTERFACE]!r} instead. Choose one of these, or unset it."
            )
        return chosen
    return [address for address in found.values() if not address.startswith("127.")]


def check_interfaces(variable: str, env: Mapping[str, str]) -> None:
    """Raise ConfigurationError if `variable` names a network interface that this host does not have.

    Its names are separated by commas. Gloo itself fails later, with an error of C++ that does not name the variable.
    """
    names = [name.strip() for name in env.get(variable, "").split(",") if name.strip()]
    existing = [name for _, name in socket.if_nameindex()]
    if not set(names) <= set(existing):
        raise ConfigurationError(
            f"`{variable}` must name network interfaces of {socket.gethostname()} ({', '.join(existing)}), but is "
            f"{env[variable]!r} instead. Choose one of these, or unset it: dualdist finds one by itself."
        )


def interface_of(address: str) -> str:
    """Return the name of the network interface with `address`. Raises ConfigurationError when there is none."""
    for name, own in addresses().items():
        if own == address or (own.startswith("127.") and address.startswith("127.")):
            return name
    raise ConfigurationError(
        f"No network interface has the address {address}. Set {INTERFACE} to the right one of {', '.join(addresses())}."
    )


def own_address(host: str) -> str:
    """Return the IPv4 address from which this machine reaches `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing.
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def own_node() -> str:
    """Return a name that no other host has, even if several hosts have the same host name."""
    # A container with its own network namespace counts as a host.
    network = os.stat("/proc/self/ns/net").st_ino
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return f"{socket.gethostname()[:100]}-{hashlib.sha256(f'{boot}{network}'.encode()).hexdigest()[:8]}"


def shown_host(node: str) -> str:
    """Return the host's own name from that of `own_node`."""
    return node.rpartition("-")[0] or node


_CONNECT_SECONDS = 3.0


@dataclass(frozen=True)
class Addresses:
    """The IPv4 addresses at which the processes of a job reach each other."""

    first: str
    """The address at which all processes reach rank 0."""
    own: str
    """The address at which the others reach this process; 127.0.0.1 when all share a host."""
    nodes: tuple[str, ...]
    """The host of each rank, as `own_node` returns it."""
    offers: Sequence[Any] = ()
    """What each rank offers to the others."""


def find_addresses(
    rank: int, gather: Gather, env: Mapping[str, str], offer: Callable[[str], Any] = lambda address: None
) -> Addresses:
    """Find the addresses of rank 0 and of this process. Collective over the launched processes.

    offer: returns what this process offers to the others at its own address, in types of JSON. On several hosts it is
    called again, with another address: only the last call counts.
    Raises ConfigurationError on every rank when a host does not reach rank 0, or DUALDIST_INTERFACE is wrong on a host.
    """
    mine: list[str] = []
    own, offered, problem = LOOPBACK, None, ""
    try:
        mine = candidates(env)
        own = mine[0] if env.get(INTERFACE) else LOOPBACK
        offered = offer(own)
    except ConfigurationError as error:
        problem = str(error)
    gathered = [json.loads(text) for text in gather(json.dumps([own_node(), problem, offered]))]
    nodes, problems, offers = zip(*gathered, strict=True)
    for other, text in enumerate(problems):
        if text:
            raise ConfigurationError(f"Rank {other}: {text}")
    if len(set(nodes)) == 1:
        return Addresses(own, own, nodes, offers)
    with contextlib.ExitStack() as stack:
        there = ["", 0, []]
        if rank == 0:
            secret = secrets.token_bytes(32)
            there = [secret.hex(), stack.enter_context(MeetingServer(1, mine, secret)).port, mine]
        secret_text, port, hosts = json.loads(gather(json.dumps(there))[0])
        # On each other host, one process tries to connect.
        tries = rank == nodes.index(nodes[rank]) and nodes[rank] != nodes[0]
        reached = _reachable(hosts, port, bytes.fromhex(secret_text)) if tries else {}
        reports = [json.loads(text) for text in gather(json.dumps(reached))]
    found = _choose(rank, nodes, hosts, reports)
    return replace(found, offers=[json.loads(text) for text in gather(json.dumps(offer(found.own)))])


def _choose(
    rank: int, nodes: tuple[str, ...], offered: Sequence[str], reports: Sequence[Mapping[str, str]]
) -> Addresses:
    """Return the first of the `offered` addresses that is in every node's report, and this process's own.

    reports[r]: address of rank 0 -> the address from which rank r reached it.
    """
    by_node = {node: reports[nodes.index(node)] for node in nodes if node != nodes[0]}
    for first in offered:
        if all(first in report for report in by_node.values()):
            own = first if nodes[rank] == nodes[0] else by_node[nodes[rank]][first]
            return Addresses(first, own, nodes)
    reached = [f"{node} reached {', '.join(report) or 'none'}" for node, report in by_node.items()]
    raise ConfigurationError(
        f"Every host must reach one address of rank 0's host {nodes[0]} ({', '.join(offered) or 'which has none'}), "
        f"but {'; '.join(reached)} instead. Set {INTERFACE} to the network interface that connects the hosts, or "
        "open the firewall between them."
    )


def _reachable(hosts: Sequence[str], port: int, secret: bytes) -> dict[str, str]:
    """Return {address: own address} of the addresses at which a server proves that it knows `secret`."""

    def own_towards(host: str) -> str | None:
        with contextlib.suppress(OSError), reach([(host, port)], secret, _CONNECT_SECONDS) as connection:
            return str(connection.getsockname()[0])
        return None

    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        found = zip(hosts, pool.map(own_towards, hosts), strict=True)
    return {host: own for host, own in found if own is not None}
