"""Who am I, and who says so: launch detection, and finding the first address. Imports no torch."""

from __future__ import annotations

from .detect import LAUNCHERS, Launcher, detect
from .exchange import exchange_address, gather_through
from .interfaces import INTERFACE, LOOPBACK, interface_of, own_node
from .reach import Addresses, Gather, find_addresses
from .spawn import spawn_processes
from .topology import Place, nodes, topology

__all__ = (
    "INTERFACE",
    "LAUNCHERS",
    "LOOPBACK",
    "Addresses",
    "Gather",
    "Launcher",
    "Place",
    "detect",
    "exchange_address",
    "find_addresses",
    "gather_through",
    "interface_of",
    "nodes",
    "own_node",
    "spawn_processes",
    "topology",
)
