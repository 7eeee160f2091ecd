"""A barrier that names the missing ranks, as gloo has it."""

from __future__ import annotations

import time
from typing import Any

__all__ = ("monitored_barrier",)

_POLL_SECONDS = 0.001


def monitored_barrier(
    store: Any, rank: int, size: int, number: int, seconds: float, wait_all_ranks: bool
) -> None:
    """Wait until every member has called this. Raises RuntimeError after the timeout, on rank 0 with missing ranks.

    store: c10d's Store of the group. number: how many of these barriers this is. seconds: the timeout.
    wait_all_ranks: whether to name all missing ranks instead of the first one.
    """
    deadline = time.monotonic() + seconds
    key = f"monitored_barrier/{number}"
    if rank > 0:
        store.set(f"{key}/{rank}", "")
        if not _appears(store, f"{key}/done", deadline):
            raise RuntimeError(
                f"Rank {rank} waited in monitored_barrier for {seconds:g} s. Rank 0 has the ranks that are missing."
            )
        return
    missing = []
    for other in range(1, size):
        if _appears(store, f"{key}/{other}", deadline):
            store.delete_key(f"{key}/{other}")
            continue
        missing.append(str(other))
        if not wait_all_ranks:
            break
    if missing:
        ranks = f"Rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
        raise RuntimeError(f"{ranks} did not enter monitored_barrier within {seconds:g} s.")
    store.set(f"{key}/done", "")
    store.delete_key(f"monitored_barrier/{number - 1}/done")  # every member has left that barrier


def _appears(store: Any, key: str, deadline: float) -> bool:
    # Not Store.wait: its timeout prints lines of c10d.
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
