"""Names the ranks that are missing when torch cannot connect all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch.distributed as dist

from ..errors import HorovodInternalError
from .start_watch import StartWatch

__all__ = ("start_step",)

T = TypeVar("T")

_SETTLE_SECONDS = 3.0
"""How long ranks that fail wait for each other. Ranks that began together time out together."""
_POLL_SECONDS = 0.01


def start_step(
    step: Callable[[], T],
    store: dist.Store,
    name: str,
    rank: int,
    size: int,
    watch: StartWatch | None = None,
    seconds: float | None = None,
) -> T:
    """Return `step()`, in which torch connects all ranks. Its error names the ranks that did not arrive or have ended.

    Collective. name: a new name for each step. watch: while the world starts. seconds: how long the step may take then;
    None: it has a timeout itself. Raises HorovodInternalError.
    """
    store.set(f"{name}/begun/{rank}", "")
    try:
        result = step() if watch is None else watch.run(step, seconds)
    except RuntimeError as error:
        if watch is not None and watch.lost is not None:  # the error names it
            raise
        text = str(error).splitlines()[0]
        reason = _reason(store, name, rank, size, "time" in text.lower())
        raise HorovodInternalError(
            f"Rank {rank} could not connect to the other ranks: {reason}. Look at their output ({text})."
        ) from error
    store.set(f"{name}/ended/{rank}", "")
    return result


def _reason(store: dist.Store, name: str, rank: int, size: int, is_timeout: bool) -> str:
    def without(key: str, ranks: Iterable[int]) -> list[int]:
        return [other for other in ranks if not store.check([f"{name}/{key}/{other}"])]

    def settle(key: str, ranks: Iterable[int]) -> list[int]:
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (waiting := without(key, ranks)) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return waiting

    try:
        store.set(f"{name}/ended/{rank}", "")
        absent = without("begun", range(size))
        missing = absent + settle("ended", set(range(size)) - set(absent))
        store.set(f"{name}/read/{rank}", "")
        # Rank 0 may serve the store, so it stays until the others have read it.
        if rank == 0:
            settle("read", set(range(size)) - set(missing))
    except RuntimeError:
        return "rank 0, or the launcher that serves the job's store, has ended"
    return _shown(sorted(missing), is_timeout)


def _shown(missing: list[int], is_timeout: bool) -> str:
    if not missing:
        return "one of them has ended"
    ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    if len(missing) > 1 and not is_timeout:
        return f"one of {ranks} has ended"
    return f"{ranks} did not arrive, or {'have' if len(missing) > 1 else 'has'} ended"
