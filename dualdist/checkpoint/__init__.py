"""Checkpoints that survive crashes, and load under any backend, wrapper, device and number of ranks.

`save` and `load` handle one file, `CheckpointManager` the files of a run. storage/format.py describes the file.
"""

from __future__ import annotations

from .contents.rng import RandomState
from .export import export_weights
from .manager import CheckpointManager
from .save_and_load import load, save
from .signals import Preempted
from .storage.filesystem import FileSystem
from .storage.manifest import Manifest, read_manifest

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
