"""A c10d PrefixStore for the current processes only, inside a store that outlives them.

torchrun keeps one store for all its restarts, which may change ranks and size, and for programs that run one after
another. Old keys look like new ones. TORCHELASTIC_RESTART_COUNT does not distinguish them: it counts the failures of
one agent only. Therefore every rank sends a random token, and rank 0 replies to each new token with the prefix to use.
A token may come from a process that has ended. Therefore a reply does not show that a rank is there; only the first
gathering of texts under the prefix does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from ..rendezvous import Gather, not_arrived
from .store_gather import store_gather

__all__ = ("new_prefix_store",)

_POLL_SECONDS = 0.02


def new_prefix_store(
    store: dist.Store, rank: int, size: int, timeout: timedelta, advice: str
) -> tuple[dist.PrefixStore, Gather]:
    """Return a part of `store` for these `size` processes only, and a Gather that uses it. Collective.

    Every process must call the Gather next: rank 0 replies to the other ranks only inside its first call.

    timeout: how long to wait for another process. advice: the last sentences of the error. This call and the Gather
    raise ConfigurationError when a process does not arrive.
    """
    seconds = timeout.total_seconds()
    token = secrets.token_hex(8)
    calls = _QueuedCalls(store) if _has_queues(store) else _PolledCalls(store, size)
    prefix = token if rank == 0 else _request(store, calls, token, rank, timeout, advice)
    part = dist.PrefixStore(f"dualdist/{prefix}", store)
    reply = functools.partial(calls.reply, prefix) if rank == 0 else None
    arrival = dist.PrefixStore("arrival", part)
    first = store_gather(arrival, rank, size, seconds, advice=advice, pause=reply, after_set=calls.wake)
    # All ranks have arrived by then. Rank 0 needs no wake-ups, and must not reply to the tokens of later processes.
    later = store_gather(dist.PrefixStore("later", part), rank, size, seconds, advice=advice)
    gathers = itertools.chain([first], itertools.repeat(later))
    return part, lambda text: next(gathers)(text)


def _request(
    store: dist.Store,
    calls: _QueuedCalls | _PolledCalls,
    token: str,
    rank: int,
    timeout: timedelta,
    advice: str,
) -> str:
    """Send `token`, and return the prefix that rank 0 replies."""
    calls.send(rank, token)
    try:
        store.wait([f"dualdist/answer/{token}"], timeout)
    except RuntimeError as error:
        raise not_arrived(rank, [0], timeout.total_seconds(), advice) from error
    return store.get(f"dualdist/answer/{token}").decode()


def _has_queues(store: dist.Store) -> bool:
    """Return whether `store` has queues that a process can wait for.

    HashStore's `queue_push` wakes only one of the threads that wait for any key, perhaps another one (torch 2.15).
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return bool(getattr(store, "libuvBackend", False))


class _QueuedCalls:
    """Tokens that rank 0 takes from a queue. It waits for the next one, without questions in between."""

    _KEY, _WAKE = "dualdist/calls", b"-"

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def send(self, rank: int, token: str) -> None:
        self._store.queue_push(self._KEY, token.encode())

    def wake(self) -> None:
        """End rank 0's wait."""
        self._store.queue_push(self._KEY, self._WAKE)

    def reply(self, prefix: str, seconds: float) -> None:
        """Wait for calls, at most so many seconds, and reply to each, also to those of earlier processes."""
        # The wait ends by its timeout or without a connection, which the next question reports.
        with contextlib.suppress(RuntimeError):
            self._store.wait([self._KEY], timedelta(seconds=seconds))
            while True:
                token = self._store.queue_pop(self._KEY, False)  # raises when the queue is empty
                if token != self._WAKE:
                    self._store.set(f"dualdist/answer/{token.decode()}", prefix)


class _PolledCalls:
    """Tokens under one key for each rank, for stores without queues, such as FileStore."""

    def __init__(self, store: dist.Store, size: int) -> None:
        self._store, self._size = store, size
        self._answered: dict[int, bytes] = {}

    def send(self, rank: int, token: str) -> None:
        self._store.set(f"dualdist/call/{rank}", token)

    def wake(self) -> None:
        """Do nothing: rank 0 asks again soon."""

    def reply(self, prefix: str, seconds: float) -> None:
        """Reply to every new token, also to those of earlier processes, and pause for a moment."""
        for rank in range(1, self._size):
            call = f"dualdist/call/{rank}"
            if self._store.check([call]) and (token := self._store.get(call)) != self._answered.get(rank):
                self._store.set(f"dualdist/answer/{token.decode()}", prefix)
                self._answered[rank] = token
        time.sleep(min(seconds, _POLL_SECONDS))
