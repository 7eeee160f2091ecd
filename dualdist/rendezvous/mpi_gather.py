"""Gathering texts from the ranks of an MPI communicator, with a timeout.

A rank that waits too long sends a message to each other rank. Those that wait as well answer with the same message and
raise, too. Ranks that send nothing are missing.
"""

from __future__ import annotations

import time
from array import array
from typing import Any

from ..errors import ConfigurationError
from . import mpi
from .mpi_start import missing_on_host, waited

__all__ = ("gather_through_mpi",)

_PAUSE_SECONDS = (0.00005, 0.005)
"""The first and the longest pause between two polls."""
_SETTLE_SECONDS = 1.0
"""How long to wait for the messages of the others."""
_TAG = 29_313
"""Of the messages. MPI allows tags up to 32767 at least."""

_abandoned: list[Any] = []
"""Requests that MPI may still work on, with their memory."""


def gather_through_mpi(text: str, *, seconds: float, communicator: Any = None) -> list[str]:
    """Return every rank's `text`, in rank order. Collective over `communicator`, by default MPI's world.

    Raises ConfigurationError, which names the missing ranks, if a rank does not call this within `seconds`. MPI cannot
    be used again then.
    """
    library: Any = mpi.library()
    wait = _Wait(library, communicator or library.COMM_WORLD, seconds)
    own, size = text.encode(), wait.world.Get_size()
    counts = array("q", [0] * size)
    wait.for_request(
        wait.world.Iallgather([array("q", [len(own)]), library.INT64_T], [counts, library.INT64_T])
    )
    received = bytearray(sum(counts))
    wait.for_request(wait.world.Iallgatherv([own, library.BYTE], [received, list(counts), library.BYTE]))
    parts, start = [], 0
    for count in counts:
        parts.append(received[start : start + count].decode())
        start += count
    return parts


class _Wait:
    """The wait for the other ranks in one gather."""

    def __init__(self, library: Any, world: Any, seconds: float) -> None:
        self._library = library
        self.world = world
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._rank = int(world.Get_rank())

    def for_request(self, request: Any) -> None:
        """Return when `request` is complete. Raises ConfigurationError after the deadline."""
        pause, longest = _PAUSE_SECONDS
        while not request.Test():
            if time.monotonic() > self._deadline or self._has_message():
                _abandoned.append(request)
                mpi.record_failure("gather")
                raise ConfigurationError(waited(self._rank, self._missing(), "init()", self._seconds))
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _has_message(self) -> bool:
        return bool(self.world.Iprobe(self._library.ANY_SOURCE, _TAG))

    def _missing(self) -> list[int]:
        """Send a message to each other rank, and return those that send none."""
        silent = set(range(self.world.Get_size())) - {self._rank}
        _abandoned.extend(self.world.Isend([b"", self._library.BYTE], rank, _TAG) for rank in sorted(silent))
        deadline, status = time.monotonic() + _SETTLE_SECONDS, self._library.Status()
        while silent and time.monotonic() < deadline:
            while self.world.Iprobe(self._library.ANY_SOURCE, _TAG, status):
                source = status.Get_source()
                self.world.Recv([bytearray(), self._library.BYTE], source, _TAG)
                silent.discard(source)
            time.sleep(_PAUSE_SECONDS[1])
        # A rank that is not missing may have received all texts.
        return sorted(silent & set(missing_on_host())) or sorted(silent)
