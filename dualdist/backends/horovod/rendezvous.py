"""The rendezvous of Horovod's Gloo controller, which horovodrun provides, for every other launcher.

Rank 0 serves it on the one address that the other processes use. Its port goes to all ranks through the store that they
share, and every rank sets the variables that hvd.init() reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import ConfigurationError
from ...launch import Place, nodes, topology
from ...rendezvous import check_interfaces, interface_of, own_node
from ...rendezvous.http_store import HttpStore, horovods_scopes
from ...types import Launch, Settings
from ..start_watch import StartWatch
from ..store import SharedStore, open_store
from ..store_gather import store_gather
from .repairs import horovods_version

__all__ = ("GlooRendezvous", "serve_rendezvous")

_ERROR_SECONDS = 7
"""How long a rank may need to ask the others what they do, and to raise its error."""


@dataclass(frozen=True)
class GlooRendezvous:
    """What a process needs for hvd.init() with the Gloo controller."""

    shared: SharedStore
    variables: Mapping[str, str]
    watch: StartWatch
    server: HttpStore | None = None
    """On rank 0."""

    def close(self) -> None:
        """Stop the watch and the server. Local."""
        self.watch.close(started=False)
        if self.server is not None:
            self.server.close()


def serve_rendezvous(launch: Launch, env: Mapping[str, str], settings: Settings) -> GlooRendezvous:
    """Serve Horovod's rendezvous from rank 0, and return the variables that hvd.init() reads. Collective.

    The variables are those of
    horovod/common/gloo/gloo_context.cc:134-170. HOROVOD_CPU_OPERATIONS keeps a build with MPI from starting MPI.
    """
    timeout = settings.start_timeout_seconds
    check_interfaces("HOROVOD_GLOO_IFACE", env)
    shared = open_store(launch, env, timeout)
    gather = store_gather(shared.store, launch.rank, launch.size, timeout)
    own_part = json.dumps([horovods_version(), own_node(), launch.local_rank])
    versions, *columns = zip(*map(json.loads, gather(own_part)), strict=True)
    _check_builds(versions)
    places: list[Place] = list(zip(*columns, strict=True))
    names, worlds = nodes(places), topology(places)
    is_first = launch.rank == 0
    server = HttpStore(shared.addresses.first, horovods_scopes(names, worlds)) if is_first else None
    port = gather(str(server.port if server else None))[0]
    own = worlds[launch.rank]
    watch = StartWatch(shared.store, launch.rank, launch.size, shared.addresses.own, timeout)
    variables = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": env.get("HOROVOD_GLOO_TIMEOUT_SECONDS") or _gloo_timeout(settings),
        "HOROVOD_GLOO_IFACE": env.get("HOROVOD_GLOO_IFACE") or interface_of(shared.addresses.own),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": shared.addresses.first,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        "HOROVOD_HOSTNAME": names[launch.rank],
        "HOROVOD_RANK": str(own.rank),
        "HOROVOD_SIZE": str(own.size),
        "HOROVOD_LOCAL_RANK": str(own.local_rank),
        "HOROVOD_LOCAL_SIZE": str(own.local_size),
        "HOROVOD_CROSS_RANK": str(own.cross_rank),
        "HOROVOD_CROSS_SIZE": str(own.cross_size),
    }
    return GlooRendezvous(shared, variables, watch, server)


def _check_builds(versions: Sequence[str]) -> None:
    """Raise ConfigurationError if the ranks have different builds of Horovod, which would wait for each other."""
    for rank, version in enumerate(versions):
        if version != versions[0]:
            raise ConfigurationError(
                f"Horovod must be the same build on all ranks, but is {versions[0]} on rank 0 and {version} on rank "
                f"{rank} instead. Install the same on every host, with ci/install-horovod for example."
            )


def _gloo_timeout(settings: Settings) -> str:
    """Return how long Horovod's Gloo waits for an unreachable host: a bit longer than we do, and 37 s at most.

    Its timeout ends the process, if it happens in `hvd.init()` or while there are process sets: Horovod does not catch
    Gloo's exception (horovod/common/operations.cc:439, 727). Our error must be raised before. After our error,
    `hvd.shutdown()` waits for it.
    """
    return str(math.ceil(min(settings.stall_timeout_seconds, 30) + _ERROR_SECONDS))
