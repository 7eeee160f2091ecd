"""Which of torch's backends carries the tensors of which device, and the device of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from .. import accelerator
from ..launch import DeviceView, choose_devices
from .transports import TRANSPORTS

__all__ = (
    "adopted_config",
    "adopted_device",
    "adopted_transport",
    "bind_device",
    "carried_types",
    "config_of",
    "device_transport",
)

_CPU = "gloo"
"""What carries tensors on the CPU beside a transport for accelerators."""
_NAMES = {"mpi4py": "mpi"}
"""torch's name for a backend -> the name of the transport, where they differ."""


def device_transport() -> str | None:
    """Return the transport that torch has for this machine's accelerator; None without either."""
    kind = accelerator.kind()
    transport = dist.Backend.default_device_backend_map.get(kind) if kind else None
    if transport is None or transport not in TRANSPORTS or not TRANSPORTS[transport].needs_gpus:
        return None
    return transport if dist.is_backend_available(transport) else None


def bind_device(transport: str, views: Sequence[DeviceView], rank: int) -> torch.device | None:
    """Choose this rank's device, and make it the current one. None if `transport` needs no devices."""
    index = choose_devices(views)[rank] if TRANSPORTS[transport].needs_gpus else None
    if index is None:
        return None
    device = torch.device(str(accelerator.kind()), index)
    accelerator.bind(device)
    return device


def config_of(transport: str) -> dict[str, str]:
    """Return {type of device: torch's backend for it} for `transport`."""
    if TRANSPORTS[transport].needs_gpus:
        return {"cpu": _CPU, str(accelerator.kind()): transport}
    names = {own: name for name, own in _NAMES.items()}
    return {"cpu": names.get(transport, transport)}


def adopted_config() -> dict[str, str]:
    """Return the same for the process group that torch.distributed has, with a backend for the CPU."""
    pairs = [part.split(":", 1) for part in dist.get_backend_config().split(",")]
    return {"cpu": _CPU, **dict(pairs)}


def adopted_transport(config: Mapping[str, str]) -> str:
    """Return the transport that carries the tensors of this machine's accelerator; without one, of the CPU."""
    name = config.get(accelerator.kind() or "cpu", config["cpu"])
    return _NAMES.get(name, name)


def adopted_device(transport: str) -> torch.device | None:
    """Return the device to which the adopted group is bound, else the current one. None if it needs no devices."""
    if transport not in TRANSPORTS or not TRANSPORTS[transport].needs_gpus:
        return None
    bound: torch.device | None = dist.group.WORLD.bound_device_id  # type: ignore[union-attr]
    return bound or torch.device(str(accelerator.kind()), torch.accelerator.current_device_index())


def carried_types(config: Mapping[str, str]) -> frozenset[str]:
    """Return the types of devices whose tensors need no copy to the host."""
    through_host = (_CPU, "mpi", *_NAMES)
    return frozenset(kind for kind, name in config.items() if kind == "cpu" or name not in through_host)
