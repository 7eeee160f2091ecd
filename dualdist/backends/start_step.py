"""Names the ranks that are missing when torch cannot connect all ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch.distributed as dist

from ..errors import HorovodInternalError

__all__ = ("start_step",)

_SETTLE_SECONDS = 1.0
"""How long to wait for the other ranks' failures after a timeout: ranks that began together time out together."""


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
            f"Rank {rank} could not connect to the other ranks: {reason} ({text})."
        ) from error
    store.set(f"{name}/ended/{rank}", "")


def _reason(store: dist.Store, name: str, rank: int, size: int, is_timeout: bool) -> str:
    def without(key: str) -> list[int]:
        return [other for other in range(size) if not store.check([f"{name}/{key}/{other}"])]

    try:
        store.set(f"{name}/ended/{rank}", "")
        missing = without("begun")
        if not missing and is_timeout:
            time.sleep(_SETTLE_SECONDS)
            missing = without("ended")
    except RuntimeError:
        return "rank 0, or the launcher that serves the job's store, has ended. Look at its output"
    if not missing:
        return "one of them has ended. Look at their output"
    which = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return f"{which} did not arrive, or {'have' if len(missing) > 1 else 'has'} ended. Look at their output"
