"""Launch detection: which launcher started this process, and as which rank. Imports no torch.

A row in launchers.py describes a launcher, and detect.py reads the environment with all rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from ..types import Launch, World
from .detect import detect as detect
from .detect import launch_from as launch_from
from .launchers import DUALDIST_RUN as DUALDIST_RUN
from .launchers import ELASTIC_DIR as ELASTIC_DIR
from .launchers import LAUNCHERS as LAUNCHERS
from .launchers import SPAWN as SPAWN
from .launchers import Launcher as Launcher

# Where the ranks run: Horovod's six numbers of each rank.

Place = tuple[str, int | None]
"""(host name, local rank from the launcher or None)."""


def is_one_host(launch: Launch) -> bool:
    """Return whether all processes of `launch` are known to be on one host."""
    return launch.size in (1, launch.local_size)


def nodes(places: Sequence[Place]) -> list[str]:
    """Return the name of every rank's node. `places[r]` is where rank r runs.

    Ranks of one host with the same local rank count as different nodes: a launcher can run several agents on a host.
    """
    claims: Counter[Place] = Counter()
    names = []
    for host, local_rank in places:
        again = claims[host, local_rank] if local_rank is not None else 0
        claims[host, local_rank] += 1
        names.append(f"{host}.{again}" if again else host)
    return names


def topology(places: Sequence[Place]) -> list[World]:
    """Return every rank's World.

    cross_rank is a rank's position among the ranks with the same local_rank (horovod/runner/common/util/hosts.py:107).
    """
    members: dict[str, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes(places)):
        members[node].append(rank)
    local: dict[int, tuple[int, int]] = {}
    for ranks in members.values():
        # A stable sort: ranks without a local rank stay in rank order.
        order = sorted(ranks, key=lambda rank: places[rank][1] or 0)
        local.update({rank: (number, len(ranks)) for number, rank in enumerate(order)})
    columns: dict[int, list[int]] = defaultdict(list)
    for rank in range(len(places)):
        columns[local[rank][0]].append(rank)
    return [
        World(rank, len(places), *local[rank], columns[local[rank][0]].index(rank), len(columns[local[rank][0]]))
        for rank in range(len(places))
    ]
