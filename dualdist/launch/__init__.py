"""Launch detection: which launcher started this process, and as which rank. Imports no torch.

A row in launchers.py describes a launcher, and detect.py reads the environment with all rows.
"""

from .detect import detect, launch_from
from .launchers import DUALDIST_RUN, ELASTIC_DIR, LAUNCHERS, SPAWN, Launcher
from .places import DeviceView, Place, choose_devices, nodes, shared_devices, topology

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
