"""The names of horovod.torch.sync_batch_norm beside SyncBatchNorm."""

from __future__ import annotations

from typing import Any

import torch

from ..training.sync_batch_norm import SyncBatchNorm

__all__ = ("_SYNC_BN_V2", "_SYNC_BN_V3", "_SYNC_BN_V4", "_SyncBatchNorm")

_SYNC_BN_V2, _SYNC_BN_V3, _SYNC_BN_V4 = False, True, True
"""What Horovod finds for every torch that dualdist supports."""


class _SyncBatchNorm(torch.autograd.Function):
    """The normalization of SyncBatchNorm in training, as an autograd function over all ranks."""

    @classmethod
    def apply(
        cls,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        eps: float,
        momentum: float | None,
    ) -> Any:
        """Return the normalized `input`, and update the running statistics. Collective."""
        layer = SyncBatchNorm(
            input.shape[1],
            eps,
            momentum,
            affine=False,
            track_running_stats=running_mean is not None,
            device="meta",
        )
        layer.running_mean, layer.running_var = running_mean, running_var
        normalized = layer(input)
        shape = [1, -1] + [1] * (input.dim() - 2)
        scaled = normalized if weight is None else normalized * weight.view(shape)
        return scaled if bias is None else scaled + bias.view(shape)
