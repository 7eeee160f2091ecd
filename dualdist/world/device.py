"""The device on which this process trains."""

from __future__ import annotations

import torch

from .context import current_or_inherited

__all__ = ("device",)


def device() -> torch.device:
    """Return the GPU of this process, chosen by its local rank; the CPU if there is no GPU. Local.

    Raises NotInitializedError before `init()` on a machine with GPUs.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", current_or_inherited().world.local_rank % torch.cuda.device_count())
    return torch.device("cpu")
