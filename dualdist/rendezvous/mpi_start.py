"""How long calls of MPI may take while a world starts.

MPI has no timeouts: its calls wait for ranks that never arrive or are stopped. mpi_gather.py polls non-blocking
operations. MPI_Init and the creation of a communicator have no such form; there a thread ends the process.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import NamedTuple

from ..errors import ConfigurationError
from ..launch import detect
from ..types import Launch
from .arrivals import announce, missing_ranks
from .gather import ADVICE

__all__ = ("ending_late_calls", "limited_start", "missing_on_host", "waited")


class _Limit(NamedTuple):
    """The environment of a start, and how many seconds it may wait for other ranks."""

    env: Mapping[str, str]
    launch: Launch | None
    """This process's place in the job, as far as it is known without MPI."""
    seconds: float


_limit: ContextVar[_Limit | None] = ContextVar("limit", default=None)


@contextlib.contextmanager
def limited_start(env: Mapping[str, str], seconds: float) -> Iterator[None]:
    """Within the block, calls of MPI wait for other ranks for at most `seconds`."""
    launch = _launch(env)
    if launch is not None:
        announce(launch, env)
    token = _limit.set(_Limit(env, launch, seconds))
    try:
        yield
    finally:
        _limit.reset(token)


@contextlib.contextmanager
def ending_late_calls(call: str) -> Iterator[None]:
    """Print an error and end this process with exit code 1 if the block takes too long. The launcher ends the others.

    call: the function of MPI that the block calls. It must release Python's global lock.
    """
    limit = _limit.get()
    if limit is None:
        yield
        return
    returned = threading.Event()

    def watch() -> None:
        if not returned.wait(limit.seconds):
            rank = None if limit.launch is None else limit.launch.rank
            error = waited(rank, _missing(limit), call, limit.seconds)
            os.write(2, f"dualdist: {error}\n".encode())
            os._exit(1)

    watcher = threading.Thread(target=watch, name="dualdist-mpi-start", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        returned.set()
        watcher.join()


def missing_on_host() -> list[int]:
    """Return `missing_ranks` for the `init` in progress. Local."""
    limit = _limit.get()
    return [] if limit is None else _missing(limit)


def _missing(limit: _Limit) -> list[int]:
    return [] if limit.launch is None else missing_ranks(limit.launch, limit.env)


def waited(rank: int | None, missing: list[int], call: str, seconds: float) -> str:
    """Return the text of the error of `rank` after waiting for `missing` in `call`; no ranks: they are unknown."""
    who = "This process" if rank is None else f"Rank {rank}"
    if not missing:
        return f"{who} waited {seconds:.0f} s for another rank in {call}. {ADVICE}"
    others = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    verb = "are" if len(missing) > 1 else "is"
    return f"{who} waited {seconds:.0f} s for {others}, which did not arrive or {verb} stopped, in {call}. {ADVICE}"


def _launch(env: Mapping[str, str]) -> Launch | None:
    """Return this process's place in a job of MPI, as far as it is known without MPI."""
    with contextlib.suppress(ConfigurationError):
        launch = detect(env)
        return launch if launch.starts_mpi else None
    return None
