"""Launch detection: which launcher started this process, and as which rank. Imports no torch."""

from __future__ import annotations

from .arguments import launch_from
from .detect import detect
from .devices import DeviceView, choose_devices, shared_devices
from .launchers import DUALDIST_RUN, ELASTIC_DIR, LAUNCHERS, SPAWN, Launcher
from .topology import Place, nodes, topology

__all__ = (
    "DUALDIST_RUN",
    "ELASTIC_DIR",
    "LAUNCHERS",
    "SPAWN",
    "DeviceView",
    "Launcher",
    "Place",
    "choose_devices",
    "detect",
    "launch_from",
    "nodes",
    "shared_devices",
    "topology",
)
