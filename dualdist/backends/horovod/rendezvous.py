"""What horovodrun does for Horovod's Gloo controller, done under every other launcher.

Rank 0 serves Horovod's own rendezvous server, on the one address that the others use; all learn of it through the
store where they meet, and set what hvd.init() reads.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...launch import Place, nodes, topology
from ...rendezvous import interface_of, own_node
from ...types import Launch
from ..meeting import Meeting, gather_over, meet
from .installed import real_horovod

with real_horovod():
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

__all__ = ("Help", "bring_help")


@dataclass(frozen=True)
class Help:
    """What a process needs for hvd.init()."""

    meeting: Meeting
    variables: Mapping[str, str]
    server: Any = None
    """Horovod's rendezvous server, on rank 0."""

    def end(self) -> None:
        """End the server. Local."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()


def bring_help(launch: Launch, env: Mapping[str, str], timeout: float) -> Help:
    """Serve Horovod's rendezvous from rank 0 and return what hvd.init() reads. Collective.

    The variables are those of horovod/common/gloo/gloo_context.cc:134-170. HOROVOD_CPU_OPERATIONS keeps a build
    with MPI from starting MPI as well.
    """
    meeting = meet(launch, env, timeout)
    gather = gather_over(meeting.store, launch.rank, launch.size)
    places: list[Place] = [
        tuple(json.loads(text)) for text in gather(json.dumps([own_node(), launch.local_rank]))
    ]
    names, worlds = nodes(places), topology(places)
    mine = worlds[launch.rank]
    server = None
    if launch.rank == 0:
        server = RendezvousHTTPServer((meeting.addresses.first, 0), RendezvousHandler, 0)
        server.init(
            [
                SlotInfo(name, w.rank, w.local_rank, w.cross_rank, w.size, w.local_size, w.cross_size)
                for name, w in zip(names, worlds, strict=True)
            ]
        )
        threading.Thread(target=server.serve_forever, daemon=True).start()
    port = gather(str(server.server_address[1] if server else None))[0]
    return Help(
        meeting,
        {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": env.get("HOROVOD_GLOO_TIMEOUT_SECONDS") or _gloo_timeout(timeout),
            "HOROVOD_GLOO_IFACE": env.get("HOROVOD_GLOO_IFACE") or interface_of(meeting.addresses.own),
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": meeting.addresses.first,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
            "HOROVOD_HOSTNAME": names[launch.rank],
            "HOROVOD_RANK": str(mine.rank),
            "HOROVOD_SIZE": str(mine.size),
            "HOROVOD_LOCAL_RANK": str(mine.local_rank),
            "HOROVOD_LOCAL_SIZE": str(mine.local_size),
            "HOROVOD_CROSS_RANK": str(mine.cross_rank),
            "HOROVOD_CROSS_SIZE": str(mine.cross_size),
        },
        server,
    )


def _gloo_timeout(seconds: float) -> str:
    """Return how long Horovod's Gloo waits for a host that is cut off: its default, 30 s, or less where asked."""
    return str(max(1, min(30, int(seconds))))
