"""Gathering short texts from all processes through c10d's Store."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ..errors import ConfigurationError
from ..rendezvous import ADVICE, Gather, gather_through

__all__ = ("await_all", "store_gather")


def await_all(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: float,
    *,
    advice: str = ADVICE,
    at_poll: Callable[[], object] = lambda: None,
) -> None:
    """Wait until all ranks have called this with the same `store`. Collective. Arguments and errors: gather_through."""
    part = dist.PrefixStore("arrival", store)
    store_gather(part, rank, size, timeout, advice=advice, at_poll=at_poll)("")


def store_gather(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: float,
    *,
    advice: str = ADVICE,
    at_poll: Callable[[], object] = lambda: None,
) -> Gather:
    """Return a Gather that uses `store`. See `gather_through` for the other arguments and the errors."""

    def get(key: str, seconds: float) -> str | None:
        try:
            if seconds > 0:
                store.wait([key], timedelta(seconds=seconds))
            elif not store.check([key]):
                return None
            return store.get(key).decode()
        except dist.DistNetworkError as error:
            raise ConfigurationError(
                f"Rank {rank} lost the connection to the job's store, which rank 0 or the launcher serves: "
                f"{str(error).splitlines()[0]}. Look at their output."
            ) from error
        except RuntimeError:  # Store.wait's timeout. FileStore has no class of its own for it.
            return None

    return gather_through(rank, size, store.set, get, timeout, advice=advice, at_poll=at_poll)
