"""Two hosts, and faults of the links between them."""

from __future__ import annotations

import atexit
import contextlib
import functools

from ...helpers.namespace_hosts import Host, Network, running_network
from .faults import CUT

__all__ = ("LinkFault", "first_address", "host_of")

RATE = "8mbit"
"""Rate of slow links. A step sends about 0.3 MB."""


@functools.cache
def _network() -> Network:
    """Return the hosts, which stay until the soak ends. Needs root."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(running_network())


def host_of(rank: int) -> Host:
    """Return the host on which a rank runs."""
    hosts = _network().hosts
    return hosts[rank % len(hosts)]


def first_address() -> str:
    """Return the address of rank 0's host."""
    return host_of(0).address()


class LinkFault:
    """A fault of the links, from `strike` to `close`."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._stack = contextlib.ExitStack()

    def strike(self) -> None:
        """Cut the links, or slow them down."""
        network = _network()
        self._stack.enter_context(network.cut() if self._kind == CUT else network.slow(RATE))

    def close(self) -> None:
        """Repair the links."""
        self._stack.close()
