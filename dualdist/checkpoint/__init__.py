"""Checkpoints that outlive crashes, and load under any engine, style, device and number of ranks.

`save` and `load` are for one file, `CheckpointManager` for a run. format.py says what a file holds.
"""

from __future__ import annotations

from .export import export_weights
from .filesystem import FileSystem
from .format import Manifest, read_manifest
from .functions import load, save
from .manager import CheckpointManager
from .rng import RandomState
from .signals import Preempted

__all__ = (
    "CheckpointManager",
    "FileSystem",
    "Manifest",
    "Preempted",
    "RandomState",
    "export_weights",
    "load",
    "read_manifest",
    "save",
)
