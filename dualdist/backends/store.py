"""The key-value store through which the processes of a job meet, for both backends: c10d's Store.

A job has one store for its whole life. Every `init` uses a part of it under a new prefix, so that a second world does
not see the keys of the first, and no port is bound twice. A store served here listens only on the one address that
the other processes use.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

import torch.distributed as dist

from ..errors import ConfigurationError
from ..rendezvous import ADVICE, Addresses, find_addresses, share_server_address
from ..types import Launch
from .in_time import in_time
from .prefix_store import new_prefix_store
from .store_gather import store_gather

__all__ = ("SharedStore", "open_store", "serve_store", "share_store")

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
