"""Who am I, and who says so: launch detection, and finding the first address. Imports no torch."""

from __future__ import annotations

from .detect import ELASTIC_DIR, LAUNCHERS, Launcher, detect
from .exchange import exchange_address, gather_through
from .interfaces import INTERFACE, LOOPBACK, interface_of, own_node
from .reach import Addresses, Gather, find_addresses
from .spawn import spawn_processes
from .starter import Starter, find_starter
from .topology import Place, nodes, topology

__all__ = (
    "ELASTIC_DIR",
    "INTERFACE",
    "LAUNCHERS",
    "LOOPBACK",
    "Addresses",
    "Gather",
    "Launcher",
    "Place",
    "Starter",
    "detect",
    "exchange_address",
    "find_addresses",
    "find_starter",
    "gather_through",
    "interface_of",
    "nodes",
    "own_node",
    "spawn_processes",
    "topology",
)
