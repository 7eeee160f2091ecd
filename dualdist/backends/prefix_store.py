"""A c10d PrefixStore for the current processes only, inside a store that outlives them.

torchrun keeps one store for all its restarts, which may change ranks and size, and for programs that run one after
another. Old keys look like new ones. TORCHELASTIC_RESTART_COUNT does not distinguish them: it counts the failures of
one agent only. Therefore every rank sends a random token, and rank 0 replies to each new token with the prefix to use.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ..rendezvous import not_arrived
from .store_gather import await_all

__all__ = ("new_prefix_store",)


def new_prefix_store(
    store: dist.Store, rank: int, size: int, timeout: timedelta, advice: str
) -> dist.PrefixStore:
    """Return a part of `store` that only these `size` processes use. Collective.

    timeout: how long to wait for another process. advice: the last sentences of the error.
    Raises ConfigurationError when a process does not arrive.
    """
    token = secrets.token_hex(8)
    if rank == 0:
        prefix, at_poll = token, _replier(store, token, size)
    else:
        prefix, at_poll = _request(store, token, rank, timeout, advice), _do_nothing
    part = dist.PrefixStore(f"dualdist/{prefix}", store)
    await_all(part, rank, size, timeout.total_seconds(), advice=advice, at_poll=at_poll)
    return part


def _request(store: dist.Store, token: str, rank: int, timeout: timedelta, advice: str) -> str:
    """Send `token`, and return the prefix that rank 0 replies."""
    store.set(f"dualdist/call/{rank}", token)
    try:
        store.wait([f"dualdist/answer/{token}"], timeout)
    except RuntimeError as error:
        raise not_arrived(rank, [0], timeout.total_seconds(), advice) from error
    return store.get(f"dualdist/answer/{token}").decode()


def _replier(store: dist.Store, prefix: str, size: int) -> Callable[[], None]:
    """Return a function that replies to every new token, also to those of earlier processes."""
    answered: dict[int, bytes] = {}

    def reply() -> None:
        for rank in range(1, size):
            call = f"dualdist/call/{rank}"
            if store.check([call]) and (token := store.get(call)) != answered.get(rank):
                store.set(f"dualdist/answer/{token.decode()}", prefix)
                answered[rank] = token

    return reply


def _do_nothing() -> None:
    pass
