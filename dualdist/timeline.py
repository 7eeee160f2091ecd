"""start_timeline and stop_timeline; what a timeline is made of is in trace.py."""

from __future__ import annotations

import os

from .context import current

__all__ = ("start_timeline", "stop_timeline")


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Write a Chrome trace of all collectives from now on, as HOROVOD_TIMELINE does from `init()` on. Local.

    Rank 0 writes; on the other ranks it does nothing. Works whether or not HOROVOD_TIMELINE is set (Horovod needs it).
    The file can be read at any time, also after a crash, by chrome://tracing and ui.perfetto.dev.

    Args:
        file_path: is overwritten, unless it is being written already. One that is open under another path is closed.
        mark_cycles: put a mark CYCLE_START wherever ranks begin to agree on a collective.

    Raises:
        ConfigurationError: the file cannot be written.
        NotInitializedError: before `init()`.
    """
    current().timeline.open(os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """Close the file that `start_timeline` or HOROVOD_TIMELINE has opened, if there is one. Local.

    Raises NotInitializedError before `init()`.
    """
    current().timeline.close()
