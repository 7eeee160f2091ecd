"""From where each rank runs to Horovod's six numbers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from ..types import World

__all__ = ("Place", "nodes", "topology")

Place = tuple[str, int | None]
"""(host name, local rank as the launcher says or None)."""


def nodes(places: Sequence[Place]) -> list[str]:
    """Return the name of every rank's node. `places[r]` is where rank r runs.

    Ranks of one host that claim the same local rank are on different nodes: several agents of a launcher can share
    a host.
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

    cross_rank is a rank's place among the ranks with its local_rank (horovod/runner/common/util/hosts.py:107).
    """
    members: dict[str, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes(places)):
        members[node].append(rank)
    local: dict[int, tuple[int, int]] = {}
    for ranks in members.values():
        order = sorted(
            ranks, key=lambda rank: places[rank][1] or 0
        )  # stable: unknown local ranks stay in rank order
        local.update({rank: (number, len(ranks)) for number, rank in enumerate(order)})
    columns: dict[int, list[int]] = defaultdict(list)
    for rank in range(len(places)):
        columns[local[rank][0]].append(rank)
    return [
        World(
            rank, len(places), *local[rank], columns[local[rank][0]].index(rank), len(columns[local[rank][0]])
        )
        for rank in range(len(places))
    ]
