"""Devices that users name."""

from __future__ import annotations

from typing import Any

import torch

from ..checks import wrong

__all__ = ("checked_device",)


def checked_device(name: str, device: Any) -> torch.device:
    """Return `device`, the parameter `name`, as a torch.device. Raises TypeError if torch does not know it."""
    try:
        if isinstance(device, bool):
            raise TypeError
        return torch.device(device)
    except Exception:  # torch raises anything
        raise wrong(name, "a device", device, "Pass hvd.device().", TypeError) from None
