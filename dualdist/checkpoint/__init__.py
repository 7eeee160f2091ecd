"""Checkpoints that outlive crashes, and load under any backend, style, device and number of ranks.

`save` and `load` are for one file, `CheckpointManager` for a run. format.py says what a file holds.
"""

from __future__ import annotations

from .contents.rng import RandomState
from .export import export_weights
from .manager import CheckpointManager
from .save_and_load import load, save
from .signals import Preempted
from .storage.filesystem import FileSystem
from .storage.format import Manifest, read_manifest

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
