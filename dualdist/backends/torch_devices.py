"""Which of torch's backends carries the tensors of which device, and the device of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

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
    "error_handling",
    "transport_timeout",
)

_CPU = "gloo"
"""What carries tensors on the CPU beside a transport for accelerators."""
_NAMES = {"mpi4py": "mpi"}
"""torch's name for a backend -> the name of the transport, where they differ."""

_MARGIN = timedelta(seconds=30)
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def transport_timeout(timeout: timedelta, device: torch.device | None) -> timedelta:
    """Return the timeout of the process groups, if dualdist reports a stall after `timeout`.

    NCCL's watchdog ends the process at its timeout (ProcessGroupNCCL.cpp, `SkipCleanUp`), and its time begins earlier.
    The margin lets the ranks report the stall before. device: to which the transport is bound.
    """
    return timeout if device is None else timeout + _MARGIN


def error_handling(device: torch.device | None, env: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables with which NCCL's watchdog aborts its communicators without ending the process.

    2 is `CleanUpOnly` in ProcessGroupNCCL.hpp. The calls of this package then raise, and elastic training can continue
    in the process. A variable that the user has set stays.
    """
    return {} if device is None or _ERROR_HANDLING in env else {_ERROR_HANDLING: "2"}


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
