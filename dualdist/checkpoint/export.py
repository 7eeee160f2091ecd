"""Exporting weights to programs that do not use dualdist."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from ..checks import instance
from ..checks import path as checked_path
from ..collectives.objects import on_all_ranks
from ..errors import CheckpointError
from ..training.parallel import DistributedDataParallel
from .contents import on_host
from .files import replacing
from .transfer import from_writer

_SAFETENSORS = ".safetensors"
_WRAPPER_CLASSES = (
    AveragedModel,
    DistributedDataParallel,
    torch.nn.DataParallel,
    torch.nn.parallel.DistributedDataParallel,
)
_COMPILED = "_orig_mod"


def export_weights(path: str | os.PathLike[str], model: torch.nn.Module) -> None:
    """Write the weights and buffers of `model`, under the names that the module has without its wrappers.

    A path that ends in .safetensors gets that format, which needs the package safetensors. Any other gets what
    `torch.save(module.state_dict(), path)` writes, for `torch.load(path, weights_only=True)`. The file appears when it
    is complete. For an AveragedModel, the averages are written.

    Collective: every rank must call it; rank 0 writes. Raises CheckpointError on every rank when it cannot be written,
    TypeError when `model` is not a module.
    """

    def check() -> None:
        checked_path("path", path)
        instance("model", model, torch.nn.Module, "a torch.nn.Module")

    def export() -> None:
        named = _unwrapped(model).state_dict()
        bare = {name.replace(f"{_COMPILED}.", ""): value for name, value in named.items()}
        write: Callable[..., Any] = _save_safetensors if Path(path).suffix == _SAFETENSORS else torch.save
        try:
            with replacing(Path(path)) as file:
                write(on_host(bare, "model"), file)
        except OSError as error:
            raise CheckpointError(f"`path` must be where a file can be written, but {error}.") from error

    on_all_ranks(check, CheckpointError)
    from_writer(export)


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    while True:
        if isinstance(model, _WRAPPER_CLASSES):
            model = model.module
        elif hasattr(model, _COMPILED):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _save_safetensors(weights: Mapping[str, torch.Tensor], file: Any) -> None:
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise CheckpointError(
            f"`path` must not end in {_SAFETENSORS} without the package safetensors, but does. "
            "Run pip install safetensors, or choose another ending."
        ) from error
    # The format has no shared tensors, so each name gets its own copy.
    file.write(save({name: tensor.contiguous().clone() for name, tensor in weights.items()}))
