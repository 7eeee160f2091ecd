"""How long calls of MPI may take while a world starts.

MPI has no timeouts: its calls wait for ranks that never arrive or are stopped. mpi_gather.py polls non-blocking
operations. MPI_Init and the creation of a communicator have no such form; there a thread ends the process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import NamedTuple

from ..errors import ConfigurationError
from ..launch import detect
from ..types import Launch
from .arrivals import announce, missing_local_ranks
from .gather import ADVICE

__all__ = ("ending_late_calls", "limited_start", "missing_on_host", "waited")

_OTHER_HOSTS_SECONDS = 2.0
"""How much longer a process waits if none of its own host is missing."""


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
        if returned.wait(limit.seconds):
            return
        missing = [] if limit.launch is None else missing_local_ranks(limit.launch, limit.env)
        # When this process ends, so do the others: the host of a missing one reports first.
        if not missing and returned.wait(_OTHER_HOSTS_SECONDS):
            return
        rank = None if limit.launch is None else limit.launch.rank
        error = waited(rank, _missing(limit), call, limit.seconds, missing)
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
    """Return the missing ranks of the start in progress, if they are known. Local."""
    limit = _limit.get()
    return [] if limit is None else _missing(limit)


def _missing(limit: _Limit) -> list[int]:
    """Return the missing ranks. None if the job has several hosts: this one cannot see the ranks of the others."""
    launch = limit.launch
    if launch is None or launch.size != launch.local_size:
        return []
    return missing_local_ranks(launch, limit.env)


def waited(
    rank: int | None, missing: list[int], call: str, seconds: float, missing_here: Sequence[int] = ()
) -> str:
    """Return the text of the error of `rank` after waiting for `missing` in `call`; no ranks: they are unknown.

    missing_here: local ranks of this host.
    """
    who = "This process" if rank is None else f"Rank {rank}"
    if missing:
        others = f"{_named('rank', missing)}, which did not arrive or {_are(missing)} stopped, in {call}."
    else:
        others = f"another rank in {call}."
        if missing_here:
            named = _named("local rank", missing_here)
            others += f" On {socket.gethostname()}, {named} did not arrive or {_are(missing_here)} stopped."
    return f"{who} waited {seconds:.0f} s for {others} {ADVICE}"


def _named(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _are(numbers: Sequence[int]) -> str:
    return "are" if len(numbers) > 1 else "is"


def _launch(env: Mapping[str, str]) -> Launch | None:
    """Return this process's place in a job of MPI, as far as it is known without MPI."""
    with contextlib.suppress(ConfigurationError):
        launch = detect(env)
        return launch if launch.starts_mpi else None
    return None
