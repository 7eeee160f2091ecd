"""What several files need of torch.distributed: its errors, process groups and devices.

Nothing here communicates. All of it works without a process group of torch, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as DeviceMesh

from ...errors import HorovodInternalError, StallError
from .. import accelerator
from ..launch import DeviceView, choose_devices
from . import needs_gpus, transport_named


@contextlib.contextmanager
def wrapped() -> Iterator[None]:
    """Convert c10d's exceptions into those of this package."""
    try:
        yield
    except HorovodInternalError:
        raise
    except RuntimeError as error:
        text = str(error)
        if "aborted" in text and not dist.is_initialized():
            raise HorovodInternalError(
                "torch.distributed.destroy_process_group() has destroyed the groups of dualdist, too. Call "
                "hvd.shutdown() in its place."
            ) from error
        if "timed out" in text.lower() or "timeout" in text.lower():
            raise StallError(f"A collective did not finish in time: {text}") from error
        raise HorovodInternalError(text) from error


def world_group() -> Any:
    """Return torch's group of the whole world, None if torch.distributed does not run."""
    return dist.group.WORLD if dist.is_initialized() else None


# Which of torch's backends carries the tensors of which device, and the device of this process.

_CPU = "gloo"
"""What carries tensors on the CPU beside a transport for accelerators."""
_MPI = "mpi4py"
"""Our backend over MPI: torch has one called mpi, which only a torch that was built with MPI can use."""
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


def config_of(transport: str) -> dict[str, str]:
    """Return {type of device: torch's backend for it} for `transport`."""
    if needs_gpus(transport):
        return {"cpu": _CPU, str(accelerator.kind()): transport}
    return {"cpu": _MPI if transport == "mpi" else transport}


def adopted_config() -> dict[str, str]:
    """Return what `config_of` does, for the process group that torch.distributed has. It always has the CPU."""
    pairs = [part.split(":", 1) for part in dist.get_backend_config().split(",")]
    return {"cpu": _CPU, **dict(pairs)}


def adopted_transport(config: Mapping[str, str]) -> str:
    """Return the transport that carries the tensors of this machine's accelerator; without one, of the CPU."""
    return transport_named(config.get(accelerator.kind() or "cpu", config["cpu"]))


def adopted_device(transport: str) -> torch.device | None:
    """Return the device to which the adopted group is bound, else the one that the program has chosen.

    None if it needs no devices, or if the program has not used any.
    """
    if not needs_gpus(transport):
        return None
    bound: torch.device | None = dist.group.WORLD.bound_device_id  # type: ignore[union-attr]
    return bound or accelerator.current_device()


def carried_types(config: Mapping[str, str]) -> frozenset[str]:
    """Return the types of devices whose tensors need no copy to the host."""
    through_host = (_CPU, "mpi", _MPI)
    return frozenset(kind for kind, name in config.items() if kind == "cpu" or name not in through_host)
