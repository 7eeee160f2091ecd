"""How the processes of a job find each other before any backend runs. Imports no torch."""

from __future__ import annotations

from .exchange import exchange_address, gather_through
from .interfaces import INTERFACE, LOOPBACK, interface_of, own_node
from .reach import Addresses, Gather, find_addresses
from .starter import Starter, find_starter

__all__ = (
    "INTERFACE",
    "LOOPBACK",
    "Addresses",
    "Gather",
    "Starter",
    "exchange_address",
    "find_addresses",
    "find_starter",
    "gather_through",
    "interface_of",
    "own_node",
)
