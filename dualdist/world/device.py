"""The device on which this process trains."""

from __future__ import annotations

import torch

from .. import accelerator
from .context import current_or_inherited

__all__ = ("device",)


def device() -> torch.device:
    """Return the accelerator of this process, such as cuda:1; the CPU if it sees none. Local.

    `init` chooses it: the device to which the transport is bound, else the visible device with the local rank's number.
    A process that sees one device takes that one.

    Raises NotInitializedError before `init()` on a machine with an accelerator.
    """
    return current_or_inherited().device if accelerator.kind() else torch.device("cpu")
