"""Finds layers of torch.nn.SyncBatchNorm that would normalize by the batch of their own rank only."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

import torch

from ..backends.torch_interface import world_group
from ..world.context import current

__all__ = ("check_sync_batch_norms", "layers_with")


def check_sync_batch_norms(parts: Iterable[torch.nn.Module]) -> None:
    """Raise ValueError if one of `parts` is a torch.nn.SyncBatchNorm that cannot reach the other ranks.

    Such a layer needs a process group of torch and a GPU: it raises on the CPU, and without a group it silently uses
    its own batch (torch/nn/modules/batchnorm.py, SyncBatchNorm.forward).
    """
    if world_group() is None and current().world.size == 1:
        return
    for part in parts:
        if not isinstance(part, torch.nn.SyncBatchNorm):
            continue
        tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if world_group() is None or any(tensor.device.type == "cpu" for tensor in tensors):
            raise ValueError(
                "The model must not have a torch.nn.SyncBatchNorm here, since that layer works on GPUs over "
                "torch.distributed only, but it does. Call hvd.SyncBatchNorm.convert_sync_batchnorm(model) first."
            )


def layers_with(params: Sequence[torch.Tensor]) -> list[torch.nn.Module]:
    """Return the live layers of torch.nn.SyncBatchNorm that hold one of `params`. An optimizer knows no modules."""
    own = {id(param) for param in params}
    kinds = _with_subclasses(torch.nn.SyncBatchNorm)

    def found() -> list[torch.nn.Module]:
        # Not gc.get_objects(): while its list exists, a tuple that another thread is just making raises SystemError.
        layers = [value for kind in kinds for value in gc.get_referrers(kind) if type(value) is kind]
        return [
            layer for layer in layers if any(id(param) in own for param in layer.parameters(recurse=False))
        ]

    if not found():
        return []
    gc.collect()  # layers that were converted may be garbage
    return found()


def _with_subclasses(kind: type[torch.nn.SyncBatchNorm]) -> set[type[torch.nn.SyncBatchNorm]]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))
