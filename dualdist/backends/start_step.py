"""Names the ranks that are missing when torch cannot connect all ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

import torch.distributed as dist

from ..errors import HorovodInternalError

__all__ = ("start_step",)

_SETTLE_SECONDS = 3.0
"""How long ranks that fail wait for each other. Ranks that began together time out together."""
_POLL_SECONDS = 0.01


@contextlib.contextmanager
def start_step(store: dist.Store, name: str, rank: int, size: int) -> Iterator[None]:
    """Run a step in which torch connects all ranks. Its error names the ranks that did not arrive or have ended.

    Collective. name: a new name for each step. Raises HorovodInternalError.
    """
    store.set(f"{name}/begun/{rank}", "")
    try:
        yield
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        reason = _reason(store, name, rank, size, "time" in text.lower())
        raise HorovodInternalError(
            f"Rank {rank} could not connect to the other ranks: {reason}. Look at their output ({text})."
        ) from error
    store.set(f"{name}/ended/{rank}", "")


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
