"""Which devices a process sees, the one of each rank, and the transport that torch has for them.

The ranks choose together, from where all ranks run and which devices each of them sees.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from ..core import accelerator
from ..core.backends import needs_gpus
from ..core.launch import Place
from ..core.meeting.links import shown_host
from ..core.types import DeviceView
from ..errors import ConfigurationError, logger

_VISIBLE = (
    *(f"{prefix}_VISIBLE_DEVICES" for prefix in ("CUDA", "HIP", "ROCR", "ASCEND_RT", "MLU")),
    "ZE_AFFINITY_MASK",
)
"""Variables that select devices, and number the selected ones from 0."""


def visible(*, by_uuid: bool = False) -> tuple[str, ...]:
    """Return a name of each device that this process sees. The processes of a host use the same name for a device.

    by_uuid: ask the driver, which starts to use the accelerator. Without it, the names are those of the variables, and
    processes that cgroups confine to one device each (srun --gpus-per-task) all call theirs "0".
    """
    variable = next((os.environ[name].split(",") for name in _VISIBLE if os.environ.get(name)), [])
    names = [*variable, *map(str, range(len(variable), accelerator.count()))][: accelerator.count()]
    if not by_uuid or not names:
        return tuple(names)
    properties = map(accelerator.module().get_device_properties, range(len(names)))
    uuids = [str(getattr(found, "uuid", "")) for found in properties]
    if not all(uuid.strip("0-") for uuid in uuids):  # the driver gives none
        return tuple(names)
    # The parts of one GPU may share its UUID.
    return tuple(name if name.startswith("MIG-") else uuid for name, uuid in zip(names, uuids, strict=True))


def summary() -> tuple[str, int]:
    """Return a digest of the names of the devices that this process sees, and their number."""
    names = visible()
    return hashlib.sha256(repr(names).encode()).hexdigest()[:8], len(names)


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


def shared_devices(views: Sequence[DeviceView], chosen: Sequence[int | None]) -> Iterator[tuple[str, int, int]]:
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


def warn_of_confined_hosts(views: Sequence[DeviceView]) -> None:
    """Warn if NCCL does not find the connections between the devices of a host. Local."""
    if confined := confined_hosts(views):
        logger.warning(NO_NVLINK, ", ".join(map(shown_host, confined)))


def device_of(rank: int, places: Sequence[Place], summaries: Sequence[tuple[str, int] | None]) -> torch.device:
    """Return the device of `rank`, the CPU if it sees none. places, summaries: of all ranks; None: without devices."""
    seen = [[f"{name}.{index}" for index in range(count)] for name, count in (one or ("", 0) for one in summaries)]
    index = choose_devices([DeviceView(*place, names) for place, names in zip(places, seen, strict=True)])[rank]
    return torch.device("cpu") if index is None else torch.device(str(accelerator.kind()), index)


def check_devices(offers: Sequence[DeviceView], transport: str) -> None:
    """Raise ConfigurationError if `transport` needs a device for each process, and some have none, or share one."""
    chosen = choose_devices(offers)
    for other, index in enumerate(chosen):
        if index is None:
            raise ConfigurationError(
                f"`transport` is {transport!r}, but rank {other} on {shown_host(offers[other].host)} sees no GPU. "
                "Choose gloo, or leave its host out."
            )
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") != "0":
        return  # NCCL 2.30 and later lets processes share a device; older releases raise
    for host, ranks, devices in shared_devices(offers, chosen):
        raise ConfigurationError(
            f"`transport` is {transport!r}, which needs a GPU for each process, but the {ranks} processes on "
            f"{shown_host(host)} share {devices}. Start fewer processes there, or set DUALDIST_TRANSPORT=gloo to let "
            "them share."
        )
    slices = Counter(offer.host for offer in offers if offer.devices[0].startswith("MIG-"))
    for host, ranks in slices.items():
        if ranks > 1:  # NVIDIA/nccl#1716
            raise ConfigurationError(
                f"`transport` must be gloo for MIG slices of a host, but is {transport!r} instead for {ranks} "
                f"processes on {shown_host(host)}. Set DUALDIST_TRANSPORT=gloo."
            )


_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def error_handling(device: torch.device | None, env: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables with which NCCL's watchdog aborts its communicators without ending the process.

    2 is `CleanUpOnly` in ProcessGroupNCCL.hpp. The calls of this package then raise, and elastic training can continue
    in the process. A variable that the user has set stays.
    """
    return {} if device is None or env.get(_ERROR_HANDLING) else {_ERROR_HANDLING: "2"}


def device_transport() -> str | None:
    """Return the transport that torch has for this machine's accelerator; None without either."""
    kind = accelerator.kind()
    transport = dist.Backend.default_device_backend_map.get(kind) if kind else None
    is_usable = transport is not None and needs_gpus(transport) and dist.is_backend_available(transport)
    return transport if is_usable else None


def bind_device(transport: str, views: Sequence[DeviceView], rank: int) -> torch.device | None:
    """Choose this rank's device, and make it the current one. None if `transport` needs no devices."""
    index = choose_devices(views)[rank] if needs_gpus(transport) else None
    if index is None:
        return None
    device = torch.device(str(accelerator.kind()), index)
    accelerator.bind(device)
    return device


def adopted_device() -> torch.device | None:
    """Return the device to which the adopted group is bound, else the one that the program has chosen, if any."""
    bound: torch.device | None = dist.group.WORLD.bound_device_id  # type: ignore[union-attr]
    return bound or accelerator.current_device()
