"""Who am I, and who says so: launch detection. Imports no torch."""

from __future__ import annotations

from .detect import ELASTIC_DIR, LAUNCHERS, Launcher, detect
from .topology import Place, nodes, topology

__all__ = ("ELASTIC_DIR", "LAUNCHERS", "Launcher", "Place", "detect", "nodes", "topology")
