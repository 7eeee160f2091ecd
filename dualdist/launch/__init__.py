"""Launch detection: which launcher started this process, and as which rank. Imports no torch."""

from __future__ import annotations

from .arguments import launch_from
from .detect import detect
from .launchers import DUALDIST_RUN, ELASTIC_DIR, LAUNCHERS, SPAWN, Launcher
from .topology import Place, nodes, topology

__all__ = (
    "DUALDIST_RUN",
    "ELASTIC_DIR",
    "LAUNCHERS",
    "SPAWN",
    "Launcher",
    "Place",
    "detect",
    "launch_from",
    "nodes",
    "topology",
)
