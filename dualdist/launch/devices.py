"""The device of each rank, chosen from where all ranks run and which devices each of them sees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ("DeviceView", "choose_devices", "shared_devices")


@dataclass(frozen=True)
class DeviceView:
    """Where a rank runs, and the devices that it sees."""

    host: str
    local_rank: int | None
    """From the launcher; None if it does not say."""
    devices: Sequence[str]
    """A name for each device, in torch's order. The ranks of a host use the same name for a device."""


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
