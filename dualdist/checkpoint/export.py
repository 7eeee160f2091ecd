"""Exporting weights to programs that do not use dualdist."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from ..checks import path as checked_path
from ..collectives.objects import on_all_ranks
from ..errors import CheckpointError
from ..training.parallel import DistributedDataParallel
from .contents import on_host
from .files import replacing
from .transfer import from_writer

_SAFETENSORS = ".safetensors"
_WRAPPERS = (
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
    on_all_ranks(lambda: _check(path, model), CheckpointError)
    write: Callable[..., Any] = _save_safetensors if Path(path).suffix == _SAFETENSORS else torch.save

    def export() -> None:
        try:
            with replacing(Path(path)) as file:
                write(_weights(model), file)
        except OSError as error:
            raise CheckpointError(f"`path` must be where a file can be written, but {error}.") from error

    from_writer(export)


def _check(path: Any, model: Any) -> None:
    checked_path("path", path)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, but is a {type(model).__name__} instead.")


def _weights(model: torch.nn.Module) -> dict[str, Any]:
    named = _unwrapped(model).state_dict()
    weights: dict[str, Any] = on_host(
        {name.replace(f"{_COMPILED}.", ""): value for name, value in named.items()}, "model"
    )
    return weights


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    while True:
        if isinstance(model, _WRAPPERS):
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
