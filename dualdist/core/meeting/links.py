"""The addresses at which processes reach each other, and their connections: TCP, or Unix sockets within a host.

A host may have several networks, of which some connect to no other host (a container bridge has the same address on
every host), and its name may resolve to 127.0.1.1, as on Debian. Only an attempt to connect shows which address others
reach. Therefore rank 0 listens on all its addresses for a moment, and one process of every other host connects to each.
The first address that all of them reach is used. The address of each other host is the one from which it connected.

A process listens at one address while its world lasts, and the gather of the start carries the addresses of all ranks
(core/backends/torch_groups.py). So any ranks can connect at any time, without another exchange. Imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from ...errors import ConfigurationError, HorovodInternalError
from ..checks import shown_ranks
from .server import MeetingServer, connected, is_foreign, listener_at, reach

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


_TRY_SECONDS = 3.0


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
        with contextlib.suppress(OSError), reach([(host, port)], secret, _TRY_SECONDS) as connection:
            return str(connection.getsockname()[0])
        return None

    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        found = zip(hosts, pool.map(own_towards, hosts), strict=True)
    return {host: own for host, own in found if own is not None}


_CONNECT_SECONDS = 5.0
_CHECK_SECONDS = 0.5
"""How often a member that waits for calls looks whether another one has failed."""
_TOKEN_BYTES = 16
_LONGEST_CALL = 1 << 10


class Address(NamedTuple):
    """Where a process listens, and the token with which others must call it."""

    host: str
    port: int
    token: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}".lstrip("\0")


class Listener:
    """Where this process takes the calls of others. A call names what it is for, and waits until that is wanted."""

    def __init__(self, host: str = "") -> None:
        """Listen. Local. host: the IPv4 address at which others reach this process; "": a Unix socket of this host."""
        token = secrets.token_hex(_TOKEN_BYTES)
        # A random name in Linux's abstract namespace leaves no file (unix(7)).
        self._socket = listener_at(host or f"\0dualdist-{token}", 0)
        self._socket.setblocking(False)
        port = self._socket.getsockname()[1] if host else 0
        self.address = Address(host or f"\0dualdist-{token}", port, token)
        self.ranks: Sequence[Address] = ()
        """The addresses of all ranks of the world, in their order."""
        self._selector = selectors.PollSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._calls: dict[tuple[str, int], socket.socket] = {}
        """What a call is for and the caller's place -> its connection."""
        self._lock = threading.Lock()

    def take(self, name: str, seconds: float) -> dict[int, socket.socket]:
        """Return the calls for `name`, by the caller's place. Waits up to `seconds` for any call. Raises OSError."""
        with self._lock:
            for key, _ in self._selector.select(0 if self._named(name) else seconds):
                connection = cast(socket.socket, key.fileobj)
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    if connection is self._socket:
                        connection, _ = self._socket.accept()
                        connection.setblocking(False)
                        self._selector.register(connection, selectors.EVENT_READ)
                    else:
                        self._selector.unregister(connection)
                        self._read(connection)
            return {key[1]: self._calls.pop(key) for key in self._named(name)}

    def _named(self, name: str) -> list[tuple[str, int]]:
        return [key for key in self._calls if key[0] == name]

    def _read(self, connection: socket.socket) -> None:
        """Keep a connection whose call has arrived, in one piece since it is short. Close that of a stranger."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            token, _, call = connection.recv(_LONGEST_CALL).partition(b" ")
            if hmac.compare_digest(token, self.address.token.encode()) and not is_foreign(connection):
                place, _, name = call.decode().partition(" ")
                self._calls[name, int(place)] = connection
                stack.pop_all()

    def close(self) -> None:
        """Refuse calls from now on. Local, also in a forked process, for its copies of the sockets."""
        for key in list(self._selector.get_map().values()):
            cast(socket.socket, key.fileobj).close()
        for connection in self._calls.values():
            connection.close()
        self._calls = {}


class Links:
    """The connections of one member with those whose places differ from its own by a power of two, in a circle."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        """ranks: global ranks of the members. rank: that of this process."""
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank) if rank in self.ranks else -1
        """This process's place among the members; -1 when it is not a member."""
        self.size = len(self.ranks)
        self.steps = [1 << bit for bit in range((self.size - 1).bit_length())]
        self.sockets: dict[int, socket.socket] = {}
        """The connection to each peer, by its place."""

    def connect(
        self,
        listener: Listener,
        addresses: Sequence[Address],
        name: str,
        seconds: float,
        check: Callable[[BaseException | None], object] = lambda cause: None,
    ) -> None:
        """Connect to the peers. Collective over the members. addresses: of all members.

        name: the same on all members, and used once. seconds: to wait for the others. check: raises
        HorovodInternalError if another rank has failed. Its argument is the error that this may have caused, or None.

        Raises HorovodInternalError if a peer cannot be reached.
        """
        deadline = time.monotonic() + seconds
        peers = {(self.rank + sign * step) % self.size for step in self.steps for sign in (-1, 1)}
        called = dict.fromkeys(sorted(peer for peer in peers if peer > self.rank))
        made: dict[int, socket.socket] = {}
        missing: Sequence[int] = ()
        with contextlib.ExitStack() as stack:
            try:
                for peer in called:
                    missing = [peer]
                    made[peer] = stack.enter_context(_call(addresses[peer], self.rank, name))
                # Before the replies: a peer replies when its own calls are made.
                while missing := sorted(peers - called.keys() - made.keys()):
                    left = deadline - time.monotonic()
                    if left < 0:
                        raise TimeoutError(f"nothing arrived for {seconds:g} s")
                    for peer, connection in listener.take(name, min(_CHECK_SECONDS, left)).items():
                        made[peer] = stack.enter_context(connection)
                        connection.send(b"\1")
                    check(None)
                for peer in called:
                    missing = [peer]
                    made[peer].settimeout(max(1e-3, deadline - time.monotonic()))
                    if not made[peer].recv(1):
                        raise OSError(f"{addresses[peer]}: another program listens at this address")
            except OSError as error:
                check(error)
                others = shown_ranks([self.ranks[place] for place in missing])
                raise HorovodInternalError(
                    f"Rank {self.ranks[self.rank]} could not connect to {others} of {list(self.ranks)}: {error}. Look "
                    "at their output."
                ) from error
            stack.pop_all()
        for connection in made.values():
            connection.setblocking(False)
        self.sockets = made

    def hung_up(self) -> list[int]:
        """Return the places of the peers whose connection is closed, at either end. Local."""
        poll, places = select.poll(), {}
        for place, connection in list(self.sockets.items()):
            if (descriptor := connection.fileno()) < 0:  # another thread closes the links
                return [place]
            poll.register(descriptor, select.POLLRDHUP)
            places[descriptor] = place
        return [places[descriptor] for descriptor, _ in poll.poll(0)]

    def close(self) -> None:
        """Close the connections. The peers notice it. Local."""
        for connection in self.sockets.values():
            # shutdown() wakes the threads that wait for the peer, also those of forked processes.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self.sockets = {}

    def abandon(self) -> None:
        """In a forked process, close its copies of the sockets. The parent's connections stay open. Local."""
        for connection in self.sockets.values():
            connection.close()


def _call(address: Address, place: int, name: str) -> socket.socket:
    """Connect to a listener, which need not have accepted the connection yet. Raises OSError."""
    with contextlib.ExitStack() as stack:
        try:
            connection = stack.enter_context(connected(*address[:2], _CONNECT_SECONDS))
            if is_foreign(connection):
                raise OSError("another user listens at a member's address")
            connection.sendall(f"{address.token} {place} {name}".encode())
        except OSError as error:
            raise OSError(f"{address}: {error}") from error
        stack.pop_all()
    return connection
