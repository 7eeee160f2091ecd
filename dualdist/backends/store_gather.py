"""Gathering short texts from all processes through c10d's Store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from ..errors import ConfigurationError
from ..rendezvous import ADVICE, Gather, gather_through
from .store_keys import get_all

__all__ = ("store_gather",)


def store_gather(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: float,
    *,
    advice: str = ADVICE,
    pause: Callable[[float], object] | None = None,
    after_set: Callable[[], object] = lambda: None,
) -> Gather:
    """Return a Gather that uses `store`.

    after_set: called when this rank has set a key. See `gather_through` for the other arguments and the errors.
    """

    def set_(key: str, text: str) -> None:
        store.set(key, text)
        after_set()

    def get(keys: Sequence[str], seconds: float) -> list[str] | None:
        try:
            if seconds > 0:
                store.wait(list(keys), timedelta(seconds=seconds))
            elif not store.check(list(keys)):
                return None
            return [text.decode() for text in get_all(store, list(keys))]
        except dist.DistNetworkError as error:
            raise ConfigurationError(
                f"Rank {rank} lost the connection to the job's store, which rank 0 or the launcher serves: "
                f"{str(error).splitlines()[0]}. Look at their output."
            ) from error
        except RuntimeError:  # Store.wait's timeout. FileStore has no class of its own for it.
            return None

    return gather_through(rank, size, set_, get, timeout, advice=advice, pause=pause)
