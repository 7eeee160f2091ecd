"""Devices that users name."""

from __future__ import annotations

from typing import Any

import torch

from ..checks import converted

__all__ = ("checked_device",)


def checked_device(name: str, device: Any) -> torch.device:
    """Return `device`, the parameter `name`, as a torch.device. Raises TypeError if torch does not know it."""
    return converted(name, device, torch.device, "a device", "Pass hvd.device().", without=bool)
