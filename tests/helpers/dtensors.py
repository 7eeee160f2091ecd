"""The names of DTensor, which were private before torch 2.5."""

from __future__ import annotations

try:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
except ImportError:
    from torch.distributed._tensor import Replicate, Shard, distribute_tensor

__all__ = ("Replicate", "Shard", "distribute_tensor")
