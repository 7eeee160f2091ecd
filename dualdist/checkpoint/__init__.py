"""Checkpoints that survive crashes, and load under any backend, wrapper, device and number of ranks.

`save` and `load` handle one file, `CheckpointManager` the files of a run. format.py describes the file.
"""

from __future__ import annotations

from .format import Manifest, read_manifest
from .manager import CheckpointManager, Preempted
from .save_and_load import RandomState, export_weights, load, save

__all__ = (
    "CheckpointManager",
    "Manifest",
    "Preempted",
    "RandomState",
    "export_weights",
    "load",
    "read_manifest",
    "save",
)
