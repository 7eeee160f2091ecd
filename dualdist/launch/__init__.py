"""Launch detection: which launcher started this process, and as which rank. Imports no torch."""

from __future__ import annotations

from .detect import detect
from .launchers import ELASTIC_DIR, LAUNCHERS, Launcher
from .topology import Place, nodes, topology

__all__ = ("ELASTIC_DIR", "LAUNCHERS", "Launcher", "Place", "detect", "nodes", "topology")
