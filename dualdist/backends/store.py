"""The key-value store through which the processes of a job meet, for both backends: c10d's Store.

A job has one store for its whole life. Every `init` uses a part of it under a new prefix, so that a second world does
not see the keys of the first, and no port is bound twice. A store served here listens only on the one address that
the other processes use.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

import torch.distributed as dist

from ..errors import ConfigurationError
from ..executor import in_time
from ..meeting import (
    ADVICE,
    Addresses,
    Gather,
    find_addresses,
    gather_through,
    not_arrived,
    share_server_address,
)
from ..types import Launch

# Reading many keys of c10d's Store at once.


def get_all(store: dist.Store, keys: list[str]) -> list[bytes]:
    """Return the values of `keys`, which must be set, in one call if the store has `multi_get`."""
    if store.has_extended_api():  # type: ignore[attr-defined]
        return list(store.multi_get(keys))
    return [store.get(key) for key in keys]


# Gathering short texts from all processes through c10d's Store.


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


# A c10d PrefixStore for the current processes only, inside a store that outlives them.
#
# torchrun keeps one store for all its restarts, which may change ranks and size, and for programs that run one after
# another. Old keys look like new ones. TORCHELASTIC_RESTART_COUNT does not distinguish them: it counts the failures of
# one agent only. Therefore every rank sends a random token, and rank 0 replies to each new token with the prefix to
# use. A token may come from a process that has ended. Therefore a reply does not show that a rank is there; only the
# first gathering of texts under the prefix does.

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


T = TypeVar("T")

_stores: dict[tuple[str, int, int], SharedStore] = {}
_generation = itertools.count()
_ANSWER_SECONDS = 1.0
"""How long the server of a store may take to answer."""
_ADVICE = {
    False: ADVICE,
    True: f"{ADVICE} If hosts join and leave, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for every torchrun: without it, "
    "its older processes may get the address of an earlier round's store.",
}
"""Whether torchrun restarts processes -> advice. If it does, its agents keep the address of an earlier round's store
(torch/distributed/elastic/rendezvous/dynamic_rendezvous.py, next_rendezvous)."""


class SharedStore(NamedTuple):
    """A store that all processes of a world share, and the addresses of these processes."""

    store: dist.Store
    """Used by one `init` only."""
    addresses: Addresses
    messages: tuple[str, ...] = ()
    """Of all ranks, in rank order."""


def open_store(launch: Launch, env: Mapping[str, str], timeout: float, message: str = "") -> SharedStore:
    """Return a store that all launched processes share. Collective.

    timeout: seconds to wait for another process. message: for all other ranks.

    When a process does not arrive, all that have arrived raise a ConfigurationError that names it.
    """
    key = (launch.init_method or launch.launcher, launch.rank, launch.size)
    is_later = key in _stores
    if not is_later:
        _stores[key] = _open_first(launch, env, timedelta(seconds=timeout))
    known = _stores[key]
    own = _own_part(known.store.clone() if is_later and not _is_free(known.store) else known.store)
    # Also at a later start, when the store is open already.
    part = dist.PrefixStore("arrival", own)
    gather = store_gather(part, launch.rank, launch.size, timeout, advice=_ADVICE[launch.restarts])
    return SharedStore(own, known.addresses, tuple(gather(message)))


def share_store(
    store: dist.Store, rank: int, size: int, env: Mapping[str, str], timeout: float
) -> SharedStore:
    """Return a new part of `store`, which these `size` processes share already. Collective."""
    own = _own_part(store)
    return SharedStore(own, find_addresses(rank, store_gather(own, rank, size, timeout), env))


def serve_store(host: str, timeout: timedelta) -> dist.TCPStore:
    """Serve a store on a free port of the address `host` only."""
    server = socket.create_server((host, 0), backlog=4096)
    port = server.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=server.detach()
    )


def _own_part(store: dist.Store) -> dist.Store:
    return dist.PrefixStore(f"dualdist/{next(_generation)}", store)


def _open_first(launch: Launch, env: Mapping[str, str], timeout: timedelta) -> SharedStore:
    if launch.init_method is not None:
        given = _rendezvous(launch, env, timeout)
        store, gather = new_prefix_store(given, launch.rank, launch.size, timeout, _ADVICE[launch.restarts])
        return SharedStore(store, find_addresses(launch.rank, gather, env))
    served: list[dist.TCPStore] = []

    def serve(host: str) -> int:
        served.append(serve_store(host, timeout))
        return int(served[0].port)

    with share_server_address(launch, env, serve, timeout.total_seconds()) as (host, port):
        joined = served[0] if served else dist.TCPStore(host, port, is_master=False, timeout=timeout)
        part = dist.PrefixStore("dualdist/addresses", joined)
        gather = store_gather(part, launch.rank, launch.size, timeout.total_seconds())
        return SharedStore(joined, find_addresses(launch.rank, gather, env))


def _is_free(store: dist.Store) -> bool:
    """Return whether no thread waits in `store`. A failed start may have left one, and then no other can use it."""
    try:
        in_time(lambda: store.check(["free"]), _ANSWER_SECONDS)
    except RuntimeError:  # the server has ended, which the next call reports
        return True
    except OSError:
        return False
    return True


def _met(rendezvous: Callable[[], T], timeout: timedelta) -> T:
    """Return `rendezvous()`. Raises OSError after twice the timeout.

    torch's own timeout does not hold if the server accepts connections but is stopped: its second attempt waits for an
    answer without a limit (TCPStore.cpp, recvValue).
    """
    try:
        return in_time(rendezvous, 2 * timeout.total_seconds() + 1)
    except TimeoutError as error:
        if error.errno is not None:
            raise
        raise OSError("It accepts connections, but does not answer. Its process may be stopped.") from None


def _rendezvous(launch: Launch, env: Mapping[str, str], timeout: timedelta) -> dist.Store:
    method = cast(str, launch.init_method)
    # With a world size of 1, torch's TCPStore does not wait for the others: new_prefix_store does, and names them.
    size = 1 if method.startswith(("tcp://", "env://")) else launch.size
    try:
        store, _, _ = _met(
            lambda: next(iter(dist.rendezvous(method, launch.rank, size, timeout=timeout))), timeout
        )
    except (RuntimeError, ValueError, OSError, AssertionError) as error:
        reason = _why_unknown(method, env) or str(error).splitlines()[0]
        raise ConfigurationError(
            f"Rank {launch.rank} of {launch.describe('size')} could not open the store of the job, which rank 0 or the "
            f"launcher serves, at `init_method`={launch.init_method!r}: {reason} Check the address, and that rank 0 "
            "was started."
        ) from error
    return cast(dist.Store, store)


def _why_unknown(method: str, env: Mapping[str, str]) -> str | None:
    """Return why the host of `init_method` has no address; None if it has one, or there is no host."""
    if method.startswith("file://"):
        return None
    host: str | None = method
    try:
        host = env.get("MASTER_ADDR") if method == "env://" else urlsplit(method).hostname
        socket.getaddrinfo(host, 0)
    except (OSError, ValueError) as error:
        return f"the host {host!r} has no address ({getattr(error, 'strerror', None) or error})."
    return None
