"""The key-value store where the processes of a job meet, for both backends: c10d's Store, wherever it is served.

A job has one store for its whole life; every `init` takes a part of it under its own prefix, so that a second world
never meets the remains of the first, and no port is bound twice. A store that is served here listens on the one
address that the others use.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch.distributed as dist

from ..errors import ConfigurationError
from ..rendezvous import Addresses, Gather, exchange_address, find_addresses, gather_through
from ..types import Launch
from .fresh import fresh_part

__all__ = ("Meeting", "gather_over", "meet", "meet_in", "serve_store")

_meetings: dict[tuple[str, int, int], Meeting] = {}
_generation = itertools.count()
_ADVICE = {
    False: "Look at that rank's output; every process must call dualdist.init().",
    True: "Look at that rank's output. Where hosts come and go, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for every "
    "torchrun: without it, its older processes may be sent to an earlier round's store.",
}
"""By whether torchrun starts processes anew: its agents keep the address of the store of an earlier round
(torch/distributed/elastic/rendezvous/dynamic_rendezvous.py, next_rendezvous)."""


@dataclass(frozen=True)
class Meeting:
    """Where the processes of a world meet."""

    store: dist.Store
    """Shared by all, for this `init` alone."""
    addresses: Addresses


def meet(launch: Launch, env: Mapping[str, str], timeout: float) -> Meeting:
    """Return where all launched processes meet. Collective. timeout: seconds to wait for another process."""
    key = (launch.init_method or launch.launcher, launch.rank, launch.size)
    if key not in _meetings:
        _meetings[key] = _first_meeting(launch, env, timedelta(seconds=timeout))
    known = _meetings[key]
    return Meeting(_own_part(known.store), known.addresses)


def meet_in(store: dist.Store, rank: int, size: int, env: Mapping[str, str]) -> Meeting:
    """Return where the processes that share `store` meet. Collective."""
    own = _own_part(store)
    return Meeting(own, find_addresses(rank, gather_over(own, rank, size), env))


def gather_over(store: dist.Store, rank: int, size: int) -> Gather:
    """Return a way to gather words over `store`."""

    def get(key: str) -> str:
        try:
            return store.get(key).decode()
        except RuntimeError as error:  # c10d's timeout
            raise ConfigurationError(
                f"Rank {rank} waited for rank {key.rpartition('.')[2]}, which did not come: "
                f"{str(error).splitlines()[0]}. Look at that rank's output; every process must call dualdist.init()."
            ) from error

    return gather_through(rank, size, store.set, get)


def serve_store(host: str, timeout: timedelta) -> dist.TCPStore:
    """Serve a store on a free port of the address `host` alone."""
    server = socket.create_server((host, 0), backlog=4096)
    port = server.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=server.detach()
    )


def _own_part(store: dist.Store) -> dist.Store:
    return dist.PrefixStore(f"dualdist/{next(_generation)}", store)


def _first_meeting(launch: Launch, env: Mapping[str, str], timeout: timedelta) -> Meeting:
    if launch.init_method is not None:
        store = _rendezvous(launch, timeout)
        return _located(
            fresh_part(store, launch.rank, launch.size, timeout, _ADVICE[launch.restarts]), launch, env
        )
    served: list[dist.TCPStore] = []

    def serve(host: str) -> int:
        served.append(serve_store(host, timeout))
        return int(served[0].port)

    with exchange_address(launch, env, serve, timeout.total_seconds()) as (host, port):
        store = served[0] if served else dist.TCPStore(host, port, is_master=False, timeout=timeout)
        return _located(store, launch, env)


def _located(store: dist.Store, launch: Launch, env: Mapping[str, str]) -> Meeting:
    gather = gather_over(dist.PrefixStore("dualdist/addresses", store), launch.rank, launch.size)
    return Meeting(store, find_addresses(launch.rank, gather, env))


def _rendezvous(launch: Launch, timeout: timedelta) -> dist.Store:
    method = cast(str, launch.init_method)
    try:
        store, _, _ = next(iter(dist.rendezvous(method, launch.rank, launch.size, timeout=timeout)))
    except (RuntimeError, ValueError, OSError) as error:
        raise ConfigurationError(
            f"Rank {launch.rank} of {launch.describe('size')} could not meet the others at "
            f"`init_method`={launch.init_method!r}: {str(error).splitlines()[0]}. Check the address, and that all "
            f"{launch.size} processes were started."
        ) from error
    return cast(dist.Store, store)
