"""How the processes of a job find each other before any backend runs. Imports no torch."""

from __future__ import annotations

from .addresses import Addresses, find_addresses
from .bootstrap import share_server_address
from .gather import ADVICE, Gather, gather_through, not_arrived, reporting_errors
from .interfaces import INTERFACE, LOOPBACK, check_interfaces, connected, interface_of, own_node
from .launcher_process import LauncherProcess, find_launcher_process

__all__ = (
    "ADVICE",
    "INTERFACE",
    "LOOPBACK",
    "Addresses",
    "Gather",
    "LauncherProcess",
    "check_interfaces",
    "connected",
    "find_addresses",
    "find_launcher_process",
    "gather_through",
    "interface_of",
    "not_arrived",
    "own_node",
    "reporting_errors",
    "share_server_address",
)
