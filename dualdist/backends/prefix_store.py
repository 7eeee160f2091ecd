"""A c10d PrefixStore for the current processes only, inside a store that outlives them.

torchrun keeps one store for all its restarts, which may change ranks and size, and for programs that run one after
another. Old keys look like new ones. TORCHELASTIC_RESTART_COUNT does not distinguish them: it counts the failures of
one agent only. Therefore every rank sends a random token, and rank 0 replies to each new token with the prefix to use.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from ..errors import ConfigurationError

__all__ = ("new_prefix_store",)

_POLL_SECONDS = 0.01


def new_prefix_store(
    store: dist.Store, rank: int, size: int, timeout: timedelta, advice: str
) -> dist.PrefixStore:
    """Return a part of `store` that only these `size` processes use. Collective.

    timeout: how long to wait for another process. advice: the last sentence of the error.
    Raises ConfigurationError when a process does not arrive.
    """
    token = secrets.token_hex(8)
    if rank == 0:
        part = dist.PrefixStore(f"dualdist/{token}", store)
        _send_prefix(store, part, token, size, timeout, advice)
        return part
    store.set(f"dualdist/call/{rank}", token)
    try:
        store.wait([f"dualdist/answer/{token}"], timeout)
    except RuntimeError as error:
        raise _not_arrived(rank, "0", timeout, advice) from error
    part = dist.PrefixStore(f"dualdist/{store.get(f'dualdist/answer/{token}').decode()}", store)
    part.set(f"arrived/{rank}", "")
    return part


def _send_prefix(
    store: dist.Store, part: dist.Store, prefix: str, size: int, timeout: timedelta, advice: str
) -> None:
    """Reply to every token, also to those of earlier processes, until all current processes have arrived."""
    answered: dict[int, bytes] = {}
    missing = list(range(1, size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing := [rank for rank in missing if not part.check([f"arrived/{rank}"])]:
        for rank in missing:
            call = f"dualdist/call/{rank}"
            if store.check([call]) and (token := store.get(call)) != answered.get(rank):
                store.set(f"dualdist/answer/{token.decode()}", prefix)
                answered[rank] = token
        if time.monotonic() > deadline:
            raise _not_arrived(0, ", ".join(map(str, missing)), timeout, advice)
        time.sleep(_POLL_SECONDS)


def _not_arrived(rank: int, others: str, timeout: timedelta, advice: str) -> ConfigurationError:
    return ConfigurationError(
        f"Rank {rank} waited {timeout.total_seconds():.0f} s for rank {others}, which did not arrive. {advice}"
    )
