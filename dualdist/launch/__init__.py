"""Launch detection: which launcher started this process, and as which rank. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..checks import configuration, integer, text, wrong
from ..errors import ConfigurationError
from ..types import Launch
from .detect import detect
from .launchers import DUALDIST_RUN, ELASTIC_DIR, LAUNCHERS, SPAWN, Launcher
from .topology import Place, nodes, topology

__all__ = (
    "DUALDIST_RUN",
    "ELASTIC_DIR",
    "LAUNCHERS",
    "SPAWN",
    "DeviceView",
    "Launcher",
    "Place",
    "choose_devices",
    "detect",
    "launch_from",
    "nodes",
    "shared_devices",
    "topology",
)

# A launch that the arguments of `init` describe, alone or on top of what the environment says.

_ARGUMENTS = {"rank": "rank", "size": "world_size", "init_method": "init_method"}
"""Field of Launch -> argument of `init`."""


def launch_from(
    given: Mapping[str, Any], env: Mapping[str, str], mpi_size: Callable[[], int] | None = None
) -> Launch:
    """Return the launch that `env` describes, with the fields of Launch in `given` in their place (None: not given).

    mpi_size: as in `detect`. With `is_part` in `given`, the world has only some of the launched processes: the local
    numbers and MPI's world are those of another world, and are left out.
    Rank and world size together need no launcher. Raises ConfigurationError when arguments are missing or
    contradict each other.
    """
    is_part = bool(given.get("is_part"))
    given = {field: value for field, value in given.items() if field != "is_part"}
    with configuration():
        given = _checked({field: value for field, value in given.items() if value is not None})
    if not given:
        return detect(env, mpi_size)
    alone = given.keys() >= {"rank", "size"} and not is_part
    detected = Launch("init") if alone else detect(env, mpi_size)
    if detected.launcher == "python" and given.get("init_method") != "env://":
        missing = [name for field, name in _ARGUMENTS.items() if field not in given]
        raise ConfigurationError(
            f"`{missing[0]}` must be given together with {', '.join(_ARGUMENTS[field] for field in given)}, but is "
            "None instead, and no launcher started this process. Give rank, world_size and init_method, or none."
        )
    if not (alone or is_part or "init_method" in given):
        _check_agreement(given, detected)
    sources = dict(detected.sources) | {field: f"init({_ARGUMENTS[field]}=)" for field in given}
    if is_part:
        detected = dataclasses.replace(
            detected,
            local_rank=None,
            local_size=None,
            starts_mpi=False,
            elastic=False,
            restarts=False,
            is_part=True,
        )
    launch = dataclasses.replace(detected, **given, sources=MappingProxyType(sources))
    if launch.size > 1 and launch.init_method is None and alone:
        raise ConfigurationError(
            "`init_method` must be given together with rank and world_size, but is None instead. Use "
            "'tcp://host:port', 'file:///path' or 'env://', as in torch.distributed."
        )
    if not 0 <= launch.rank < launch.size:
        raise ConfigurationError(
            f"`rank` must be at least 0 and less than world_size={launch.size}, but is {launch.rank} instead. "
            "Give every process its own rank."
        )
    return launch


def _check_agreement(given: Mapping[str, Any], detected: Launch) -> None:
    """Raise ConfigurationError if `given` contradicts the launcher: then two processes may have the same rank."""
    for field in ("rank", "size"):
        if field in given and given[field] != getattr(detected, field):
            raise ConfigurationError(
                f"`{_ARGUMENTS[field]}` must be the {detected.describe(field)} that {detected.launcher} has set, but "
                f"is {given[field]} instead. Leave it out, or give rank, world_size and init_method."
            )


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """Return `given` with integers as int. Raises TypeError or ValueError."""
    if "init_method" in given:
        fix = "Use 'tcp://host:port', 'file:///path' or 'env://', as in torch.distributed."
        method = text("init_method", given["init_method"], fix)
        if not method.startswith(("tcp://", "file://", "env://")):
            raise wrong("init_method", "an address", method, fix)
    least = {"rank": 0, "size": 1}
    numbers = {
        field: integer(_ARGUMENTS[field], given[field], least=least[field])
        for field in least
        if field in given
    }
    return {**given, **numbers}


# The device of each rank, chosen from where all ranks run and which devices each of them sees.


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
