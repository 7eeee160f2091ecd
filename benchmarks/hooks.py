"""The communication hooks that can be measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

__all__ = ("HOOKS",)

HOOKS: Mapping[str, Any] = {
    "none": None,
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
}
"""name -> torch's hook, whose state is a process group or None."""
