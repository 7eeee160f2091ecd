"""The accelerator of this machine, such as its GPUs: the only module that asks torch for the kind of device.

torch.accelerator describes CUDA, ROCm (which torch calls "cuda" as well), XPU and others in the same way. Before torch
2.6, which added it, each has a module with other names for the same functions.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from .checks import converted
from .process import in_time


class _DeviceModule:
    """The functions of torch.accelerator, before torch 2.6."""

    def __getattr__(self, name: str) -> Any:
        names = {"set_device_index": "set_device", "current_device_index": "current_device"}
        return getattr(module(), names.get(name, name))


torch_accelerator: Any = getattr(torch, "accelerator", None) or _DeviceModule()


def kind() -> str | None:
    """Return the type of the accelerator, such as "cuda" or "xpu"; None if this machine has none that works."""
    # torch.accelerator.current_accelerator raises an error on a machine without a GPU before torch 2.7.
    found = torch._C._get_accelerator()  # the CPU if this build of torch has none
    return found.type if found.type != "cpu" and torch.get_device_module(found).is_available() else None


def module() -> Any:
    """Return torch's module for the accelerator, such as torch.cuda. There must be one."""
    return torch.get_device_module(kind())


def count() -> int:
    """Return how many devices this process sees."""
    return int(torch_accelerator.device_count()) if kind() else 0


def bind(device: torch.device) -> None:
    """Make `device` the current one of this thread."""
    torch_accelerator.set_device_index(device.index)


def current_device() -> torch.device | None:
    """Return the current device of this thread; None if this process has not used the accelerator."""
    return torch.device(str(kind()), torch_accelerator.current_device_index()) if is_started() else None


def has_streams(tensor: torch.Tensor) -> bool:
    """Return whether work on `tensor` is queued on streams, so that the host runs ahead of it."""
    return not tensor.is_cpu


def is_started() -> bool:
    """Return whether this process has used the accelerator."""
    found = kind()
    return found is not None and bool(torch.get_device_module(found).is_initialized())


def synchronize(device: torch.device) -> None:
    """Wait for all work on `device`. Does nothing for the CPU."""
    if device.type == kind():
        torch_accelerator.synchronize(device)


def ends_within(device: torch.device, seconds: float) -> bool:
    """Wait at most `seconds` for all work on `device`. Return whether it has ended without an error."""
    with contextlib.suppress(TimeoutError, RuntimeError):  # or Python 3.12.1 ends, and starts no thread
        in_time(functools.partial(synchronize, device), seconds)
        return True
    return False


def checked_device(name: str, device: Any) -> torch.device:
    """Return `device`, the parameter `name`, as a torch.device. Raises TypeError if torch does not know it."""
    return converted(name, device, torch.device, "a device", "Pass hvd.device().", without=bool)
