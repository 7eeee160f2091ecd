"""Steps in which Horovod waits for other ranks, for which it has no timeout: those of the start, and the shutdown."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import TypeVar

from ...errors import StallError
from ...process_exit import skip_destructors_at_exit
from ...rendezvous import mpi
from ...rendezvous.mpi_start import missing_on_host, waited
from ..in_time import in_time
from .installed import real_horovod

with real_horovod():
    import horovod.torch as hvd

__all__ = ("forget_shutdown", "limit_shutdown_at_exit", "limited", "never_shut_down")

T = TypeVar("T")

_SHUTDOWN_SECONDS = 5.0


def limited(step: Callable[[], T], rank: int, seconds: float) -> T:
    """Return `step()`. Raises StallError, which names missing ranks of this host, after `seconds`."""
    try:
        return in_time(step, seconds)
    except (TimeoutError, StallError) as error:  # ours, or the step's own
        never_shut_down()
        raise StallError(waited(rank, missing_on_host(), "Horovod", seconds)) from error


def never_shut_down() -> None:
    """Let this process end without Horovod's shutdown, which waits for ranks that have ended."""
    forget_shutdown()
    skip_destructors_at_exit()


def forget_shutdown() -> None:
    """Take back what calls Horovod's shutdown when this process ends. Local."""
    for function in (hvd.mpi_ops._basics.shutdown, _shut_down):
        atexit.unregister(function)


def limit_shutdown_at_exit() -> None:
    """After a failure, let Horovod's shutdown take at most 5 s when this process ends. Local.

    Its background thread may wait in MPI for a rank that has stopped.
    """
    forget_shutdown()
    atexit.register(_shut_down)


def _shut_down() -> None:
    try:
        in_time(hvd.shutdown, _SHUTDOWN_SECONDS)
    except TimeoutError:
        mpi.record_failure("Horovod's shutdown")
        skip_destructors_at_exit()
