"""Finds the addresses of a host that other hosts can reach. Only an attempt to connect shows this.

A host may have several networks, of which some connect to no other host (a container bridge has the same address on
every host), and its name may resolve to 127.0.1.1, as on Debian. Therefore rank 0 listens on all its addresses for a
moment, and one process of every other host connects to each. The first address that all of them reach is used. The
address of each other host is the one from which it connected.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..errors import ConfigurationError
from .gather import Gather
from .interfaces import INTERFACE, LOOPBACK, candidates, own_node

__all__ = ("Addresses", "find_addresses")

_CONNECT_SECONDS = 3.0

_Endpoint = tuple[str, int]
"""(IPv4 address, port)."""


@dataclass(frozen=True)
class Addresses:
    """The IPv4 addresses at which the processes of a job reach each other."""

    first: str
    """The address at which all processes reach rank 0."""
    own: str
    """The address at which the others reach this process; 127.0.0.1 when all share a host."""
    nodes: tuple[str, ...]
    """The host of each rank, as `own_node` returns it."""


def find_addresses(rank: int, gather: Gather, env: Mapping[str, str]) -> Addresses:
    """Find the addresses of rank 0 and of this process. Collective over the launched processes.

    Raises ConfigurationError on every rank when a host does not reach rank 0, or DUALDIST_INTERFACE is wrong on a host.
    """
    mine: list[str] = []
    problem = ""
    try:
        mine = candidates(env)
    except ConfigurationError as error:
        problem = str(error)
    gathered = [json.loads(text) for text in gather(json.dumps([own_node(), problem]))]
    problems = [f"Rank {other}: {text}" for other, (_, text) in enumerate(gathered) if text]
    if problems:
        raise ConfigurationError(problems[0])
    nodes = tuple(node for node, _ in gathered)
    if len(set(nodes)) == 1:
        address = mine[0] if env.get(INTERFACE) else LOOPBACK
        return Addresses(address, address, nodes)
    with _listening(mine if rank == 0 else ()) as (endpoints, token):
        # Only rank 0 listens; every rank receives its endpoints and token.
        endpoints, token = json.loads(gather(json.dumps([endpoints, token]))[0])
        # On each other host, one process tries to connect.
        tries = rank == nodes.index(nodes[rank]) and nodes[rank] != nodes[0]
        reached = _reachable([(host, port) for host, port in endpoints], token) if tries else {}
        reports = [json.loads(text) for text in gather(json.dumps(reached))]
    return _choose(rank, nodes, [host for host, _ in endpoints], reports)


def _choose(
    rank: int, nodes: Sequence[str], offered: Sequence[str], reports: Sequence[Mapping[str, str]]
) -> Addresses:
    """Return the first of the `offered` addresses that is in every node's report, and this process's own.

    reports[r]: address of rank 0 -> the address from which rank r reached it.
    """
    by_node = {node: reports[nodes.index(node)] for node in nodes if node != nodes[0]}
    for first in offered:
        if all(first in report for report in by_node.values()):
            own = first if nodes[rank] == nodes[0] else by_node[nodes[rank]][first]
            return Addresses(first, own, tuple(nodes))
    reached = [f"{node} reached {', '.join(report) or 'none'}" for node, report in by_node.items()]
    raise ConfigurationError(
        f"Every host must reach one address of rank 0's host {nodes[0]} ({', '.join(offered) or 'which has none'}), "
        f"but {'; '.join(reached)} instead. Set {INTERFACE} to the network interface that connects the hosts, or "
        "open the firewall between them."
    )


@contextlib.contextmanager
def _listening(hosts: Sequence[str]) -> Iterator[tuple[list[_Endpoint], str]]:
    """Listen on a free port of each of the addresses `hosts`, and send a random token over every connection.

    Yield the endpoints and the token, by which others recognise this process.
    """
    token = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        endpoints = []
        for host in hosts:
            server = stack.enter_context(socket.create_server((host, 0)))
            endpoints.append((host, int(server.getsockname()[1])))
            selector.register(server, selectors.EVENT_READ)
        reader, writer = socket.socketpair()
        stack.callback(reader.close)
        selector.register(reader, selectors.EVENT_READ, "end")
        thread = threading.Thread(target=_send_token, args=(selector, token), daemon=True)
        thread.start()
        try:
            yield endpoints, token
        finally:
            writer.close()
            thread.join()


def _send_token(selector: selectors.BaseSelector, token: str) -> None:
    while True:
        for key, _ in selector.select():
            if key.data == "end":
                return
            with contextlib.suppress(OSError):
                caller, _ = key.fileobj.accept()  # type: ignore[union-attr]
                with caller:
                    caller.sendall(token.encode())


def _reachable(endpoints: Sequence[_Endpoint], token: str) -> dict[str, str]:
    """Return {address: own address} of the endpoints that answer with `token`."""

    def connect(endpoint: _Endpoint) -> str | None:
        with contextlib.suppress(OSError), socket.create_connection(endpoint, _CONNECT_SECONDS) as connection:
            answer = connection.recv(len(token), socket.MSG_WAITALL)
            return str(connection.getsockname()[0]) if answer == token.encode() else None
        return None

    with ThreadPoolExecutor(max(1, len(endpoints))) as pool:
        found = zip(endpoints, pool.map(connect, endpoints), strict=True)
    return {host: own for (host, _), own in found if own is not None}
