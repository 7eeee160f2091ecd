"""Processes that are forked from a rank, such as the workers of a DataLoader.

They have copies of the rank's connections, but not its threads. If one of them sends or receives
on these connections, it disturbs the messages between the rank and its peers.
"""

from __future__ import annotations

import ctypes

__all__ = ("never_delete",)


def never_delete(thing: object) -> None:
    """Keep `thing` from being deleted when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
