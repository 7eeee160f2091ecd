"""Who am I, and who says so: launch detection, and finding the first address. Imports no torch."""

from __future__ import annotations

from .address import exchange_address, own_address
from .detect import LAUNCHERS, Launcher, detect
from .spawn import spawn_processes
from .topology import Place, nodes, topology

__all__ = (
    "LAUNCHERS",
    "Launcher",
    "Place",
    "detect",
    "exchange_address",
    "nodes",
    "own_address",
    "spawn_processes",
    "topology",
)
