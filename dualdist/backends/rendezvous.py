"""The key-value store where the processes of a job meet, for both engines: c10d's Store, wherever it is served.

A job has one store for its whole life; every `init` takes a part of it under its own prefix, so that a second world
never meets the remains of the first, and no port is bound twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from datetime import timedelta
from typing import cast

import torch.distributed as dist

from ..errors import ConfigurationError
from ..launch import exchange_address
from ..types import Launch

__all__ = ("open_store", "own_part", "serve_store")

_stores: dict[tuple[str, int, int], dist.Store] = {}
_generation = itertools.count()


def open_store(launch: Launch, env: Mapping[str, str], timeout: float) -> dist.Store:
    """Return a store that all launched processes share. Collective. timeout: seconds."""
    key = (launch.init_method or launch.launcher, launch.rank, launch.size)
    if key not in _stores:
        _stores[key] = _meet(launch, env, timedelta(seconds=timeout))
    return own_part(_stores[key])


def own_part(store: dist.Store) -> dist.Store:
    """Return the part of `store` that belongs to this `init` alone."""
    return dist.PrefixStore(f"dualdist/{next(_generation)}", store)


def _meet(launch: Launch, env: Mapping[str, str], timeout: timedelta) -> dist.Store:
    if launch.init_method is not None:
        try:
            store, _, _ = next(
                iter(dist.rendezvous(launch.init_method, launch.rank, launch.size, timeout=timeout))
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise ConfigurationError(
                f"Rank {launch.rank} of {launch.describe('size')} could not meet the others at "
                f"`init_method`={launch.init_method!r}: {str(error).splitlines()[0]}. Check the address, and that all "
                f"{launch.size} processes were started."
            ) from error
        return cast(dist.Store, store)
    served: list[dist.TCPStore] = []

    def serve(host: str) -> int:
        served.append(serve_store(host, timeout))
        return int(served[0].port)

    host, port = exchange_address(launch, env, "store", serve, timeout.total_seconds())
    return served[0] if served else dist.TCPStore(host, port, is_master=False, timeout=timeout)


def serve_store(host: str, timeout: timedelta) -> dist.TCPStore:
    """Serve a store on a free port of this host."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
