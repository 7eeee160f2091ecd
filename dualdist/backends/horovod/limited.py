"""Steps of the start in which Horovod waits for the other ranks, for which it has no timeout."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import TypeVar

from ...errors import StallError
from ...process_exit import skip_destructors_at_exit
from ...rendezvous.mpi_start import missing_on_host, waited
from ..in_time import in_time
from .installed import real_horovod

with real_horovod():
    import horovod.torch as hvd

__all__ = ("limited", "never_shut_down")

T = TypeVar("T")


def limited(step: Callable[[], T], rank: int, seconds: float) -> T:
    """Return `step()`. Raises StallError, which names missing ranks of this host, after `seconds`."""
    try:
        return in_time(step, seconds)
    except (TimeoutError, StallError) as error:  # ours, or the step's own
        never_shut_down()
        raise StallError(waited(rank, missing_on_host(), "Horovod", seconds)) from error


def never_shut_down() -> None:
    """Let this process end without Horovod's shutdown, which waits for ranks that have ended."""
    atexit.unregister(hvd.mpi_ops._basics.shutdown)
    skip_destructors_at_exit()
