"""Launch detection: which launcher started this process, and as which rank. Imports no torch.

A row in launchers.py describes a launcher, and detect.py reads the environment with all rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..types import Launch, World
from .detect import detect as detect
from .detect import launch_from as launch_from
from .launchers import DUALDIST_RUN as DUALDIST_RUN
from .launchers import ELASTIC_DIR as ELASTIC_DIR
from .launchers import LAUNCHERS as LAUNCHERS
from .launchers import SPAWN as SPAWN
from .launchers import Launcher as Launcher

# Where the ranks run: Horovod's six numbers of each rank, and the device of each rank.

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
        World(
            rank, len(places), *local[rank], columns[local[rank][0]].index(rank), len(columns[local[rank][0]])
        )
        for rank in range(len(places))
    ]


# The device of each rank, chosen from where all ranks run and which devices each of them sees.


@dataclass(frozen=True)
class DeviceView:
    """Where a rank runs, and the devices that it sees."""

    host: str
    local_rank: int | None
    """From the launcher; None if it does not say."""
    devices: Sequence[str]
    """A name for each device, in torch's order. The ranks of a host use the same name for a device."""
    numbers: Sequence[str] = field(default_factory=list, kw_only=True)
    """What this process calls the devices. Processes that cgroups confine to one device each call theirs "0"."""


def choose_devices(views: Sequence[DeviceView]) -> list[int | None]:
    """Return the index of each rank's device among those that it sees; None for a rank that sees no device.

    Ranks of a host that see the same devices take the index that is their local rank, if these differ, else their place
    among these ranks. If there are more ranks than devices, several ranks share a device.
    """
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
    for rank, view in enumerate(views):
        groups[view.host, tuple(view.devices)].append(rank)
    chosen: list[int | None] = [None] * len(views)
    for (_, devices), ranks in groups.items():
        local_ranks = [views[rank].local_rank for rank in ranks]
        are_indices = len(set(local_ranks)) == len(ranks) and all(
            number is not None and number < len(devices) for number in local_ranks
        )
        for place, rank in enumerate(ranks):
            if devices:
                chosen[rank] = local_ranks[place] if are_indices else place % len(devices)
    return chosen


def shared_devices(
    views: Sequence[DeviceView], chosen: Sequence[int | None]
) -> Iterator[tuple[str, int, int]]:
    """Yield (host, number of its ranks, number of their devices) for hosts where ranks share a device."""
    used: dict[str, list[str]] = defaultdict(list)
    for view, index in zip(views, chosen, strict=True):
        if index is not None:
            used[view.host].append(view.devices[index])
    for host, devices in used.items():
        if len(set(devices)) < len(devices):
            yield host, len(devices), len(set(devices))


NO_NVLINK = (
    "Each process on %s sees only a part of the GPUs. NCCL then finds no NVLink between them, and sends much more "
    "slowly. Use `srun --ntasks-per-node=N --gpus-per-node=N --gpu-bind=none` in place of --gpus-per-task."
)
"""NVIDIA/nccl#1066: NCCL needs to see all GPUs of a host."""


def confined_hosts(views: Sequence[DeviceView]) -> list[str]:
    """Return the hosts where processes see different devices under the same numbers, as `srun --gpus-per-task` does."""
    seen: dict[tuple[str, tuple[str, ...]], set[tuple[str, ...]]] = defaultdict(set)
    for view in views:
        seen[view.host, tuple(view.numbers)].add(tuple(view.devices))
    return sorted({host for (host, numbers), devices in seen.items() if numbers and len(devices) > 1})
