"""Which address of a host the other hosts can reach: tried, since no table of a host tells.

A host may have several networks, some of which lead nowhere (a container bridge has the same address on every host),
and its name may stand for 127.0.1.1, as on Debian. So rank 0 listens on all its addresses for a moment, one process
of every other host knocks at each, and the first address that all of them have reached is taken. They in turn are
reached at the addresses from which they came.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..errors import ConfigurationError
from .interfaces import INTERFACE, LOOPBACK, candidates, own_node

__all__ = ("Addresses", "Gather", "find_addresses")

Gather = Callable[[str], list[str]]
"""Return every process's text, in rank order. Collective over the launched processes."""

_KNOCK_SECONDS = 3.0

Door = tuple[str, int]
"""(IPv4 address, port)."""


@dataclass(frozen=True)
class Addresses:
    """Where the processes of a job reach each other."""

    first: str
    """Where all reach rank 0."""
    own: str
    """Where the others reach this process; 127.0.0.1 when all share a host."""


def find_addresses(rank: int, gather: Gather, env: Mapping[str, str]) -> Addresses:
    """Find out where rank 0 and this process are reached. Collective over the launched processes.

    Raises ConfigurationError on every rank when hosts do not reach each other, or DUALDIST_INTERFACE is wrong on one.
    """
    mine: list[str] = []
    problem = ""
    try:
        mine = candidates(env)
    except ConfigurationError as error:
        problem = str(error)
    told = [json.loads(text) for text in gather(json.dumps([own_node(), mine, problem]))]
    problems = [f"Rank {other}: {text}" for other, (_, _, text) in enumerate(told) if text]
    if problems:
        raise ConfigurationError(problems[0])
    nodes = [node for node, _, _ in told]
    if len(set(nodes)) == 1:
        address = mine[0] if env.get(INTERFACE) else LOOPBACK
        return Addresses(address, address)
    with _open_doors(mine if rank == 0 else ()) as (doors, token):
        told_doors, told_token = json.loads(gather(json.dumps([doors, token]))[0])
        knocks = rank == nodes.index(nodes[rank]) and nodes[rank] != nodes[0]  # one process of each host
        reached = _knock([(host, port) for host, port in told_doors], told_token) if knocks else {}
        reports = [json.loads(text) for text in gather(json.dumps(reached))]
    return _choose(rank, nodes, [host for host, _ in told_doors], reports)


def _choose(
    rank: int, nodes: Sequence[str], offered: Sequence[str], reports: Sequence[Mapping[str, str]]
) -> Addresses:
    """Return the first of the `offered` addresses that is in every node's report, and our own beside it.

    reports[r]: address of rank 0 -> the address from which rank r reached it.
    """
    by_node = {node: reports[nodes.index(node)] for node in nodes if node != nodes[0]}
    for first in offered:
        if all(first in report for report in by_node.values()):
            return Addresses(first, first if nodes[rank] == nodes[0] else by_node[nodes[rank]][first])
    lonely = [f"{node} reached {', '.join(report) or 'none'}" for node, report in by_node.items()]
    raise ConfigurationError(
        f"Every host must reach one address of rank 0's host {nodes[0]} ({', '.join(offered) or 'which has none'}), "
        f"but {'; '.join(lonely)} instead. Set {INTERFACE} to the network interface that joins the hosts, or open the "
        "firewall between them."
    )


@contextlib.contextmanager
def _open_doors(hosts: Sequence[str]) -> Iterator[tuple[list[Door], str]]:
    """Listen on a free port of each of `hosts`, and answer every caller with the token."""
    token = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        doors = []
        for host in hosts:
            server = stack.enter_context(socket.create_server((host, 0)))
            doors.append((host, int(server.getsockname()[1])))
            selector.register(server, selectors.EVENT_READ)
        reader, writer = socket.socketpair()
        stack.callback(reader.close)
        selector.register(reader, selectors.EVENT_READ, "end")
        thread = threading.Thread(target=_answer, args=(selector, token), daemon=True)
        thread.start()
        try:
            yield doors, token
        finally:
            writer.close()
            thread.join()


def _answer(selector: selectors.BaseSelector, token: str) -> None:
    while True:
        for key, _ in selector.select():
            if key.data == "end":
                return
            with contextlib.suppress(OSError):
                caller, _ = key.fileobj.accept()  # type: ignore[union-attr]
                with caller:
                    caller.sendall(token.encode())


def _knock(doors: Sequence[Door], token: str) -> dict[str, str]:
    """Return {address: own address} of those of `doors` behind which somebody knows the token."""

    def knock(door: Door) -> str | None:
        with contextlib.suppress(OSError), socket.create_connection(door, _KNOCK_SECONDS) as connection:
            answer = connection.recv(len(token), socket.MSG_WAITALL)
            return str(connection.getsockname()[0]) if answer == token.encode() else None
        return None

    with ThreadPoolExecutor(max(1, len(doors))) as pool:
        found = zip(doors, pool.map(knock, doors), strict=True)
    return {host: own for (host, _), own in found if own is not None}
