"""Saving and loading one file, on all ranks together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from ..agreement.call import ALLGATHER_OBJECT
from ..checks import converted, flag, instance, integer, is_dtensor, mapping, text
from ..checks import path as checked_path
from ..collectives.objects import on_all_ranks
from ..errors import CheckpointError
from ..training.parallel import DistributedDataParallel
from ..world.process_sets import reporting
from .catalog import CatalogEntry
from .contents import on_host
from .files import replacing
from .format import MemoryFile, copy_verified, make_manifest, write_checkpoint
from .restoration import restore
from .transfer import from_writer, is_writer, receive_newest, write_state


def checked_metrics(metrics: Any) -> Mapping[str, float]:
    """Return `metrics` with its values as floats, which may be NaN; None: no metrics."""
    fix = 'Pass a dictionary, such as {"accuracy": 0.9}.'
    checked = {}
    for name, value in mapping("metrics", {} if metrics is None else metrics, fix=fix).items():
        text("metrics", name, fix)
        place = f"metrics[{name!r}]"
        checked[name] = converted(
            place, value, float, "a number", "Pass a float.", without=bool | str | bytes
        )
    return checked


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Write `state` to the file `path`. The old file stays until the new one is complete and on the disk.

    Rank 0 writes; the other ranks need not see the folder. The file loads under any backend, transport, device,
    wrapper (DistributedOptimizer or DistributedDataParallel) and number of ranks, and with
    `torch.load(path, weights_only=True)`.

    Collective: every rank must call it, with objects of the same names.

    Args:
        state: for each name an object with `state_dict` and `load_state_dict` (models, optimizers, schedulers,
            GradScaler, AveragedModel, samplers, RandomState), or a value: tensors, numbers, strings, None, and
            lists, tuples, sets and dictionaries of them.
        step, metrics: stored in the manifest.

    Raises:
        CheckpointError: on every rank, when the file could not be written.
        ValueError, TypeError: on every rank, when `state` is wrong, or its names differ between ranks.
    """

    def check() -> None:
        checked_metrics(metrics)
        if step is not None:
            integer("step", step, least=0)

    def write(values: dict[str, Any]) -> None:
        manifest = make_manifest(None if step is None else int(step), checked_metrics(metrics))
        try:
            write_checkpoint(checked_path("path", path), on_host(values, "state"), manifest)
        except OSError as error:
            raise CheckpointError(
                f"Checkpoint {path} was not saved: {error}. An older file of that name is unchanged."
            ) from error

    write_state(state, write, check)


def load(
    path: str | os.PathLike[str], state: Mapping[str, Any] | None = None, *, strict: bool = True
) -> dict[str, Any]:
    """Return the values in the file `path`, which `save` or a manager has written, and load them into `state`.

    Rank 0 reads the file; the other ranks need not see it. No code in it is run.

    Collective: every rank must call it.

    Args:
        state: as for `save`. Its objects load their states, and its plain values are set. None: nothing is changed.
        strict: whether names, shapes and parameter groups must all fit. False: what fits is loaded, with a warning.

    Returns:
        For each name the saved value, in host memory: the `state_dict` of an object, or the plain value.

    Raises:
        DamagedCheckpointError: the file is not as it was written, or cannot be loaded without running code in it.
        CheckpointError: there is no file, or it does not fit `state`. Then `state` is unchanged, except modules when
            the `load_state_dict` of a module or an optimizer raised. All errors are raised on every rank.
    """
    with reporting(ALLGATHER_OBJECT):
        strict = flag("strict", strict)
    found = receive_newest((lambda file: read_into(path, file)) if is_writer() else None)
    assert found is not None  # else `find` has raised
    _, _, values = found
    if state is not None:
        restore(state, values, strict=strict, origin=path)
    return values


def read_into(path: str | os.PathLike[str], file: MemoryFile) -> CatalogEntry:
    """Copy the checkpoint `path` into `file`, and return its entry. Raises CheckpointError when it is damaged."""
    checked = checked_path("path", path)
    try:
        return CatalogEntry(checked, copy_verified(checked, file.append))
    except OSError as error:
        raise CheckpointError(f"`path` could not be read as a checkpoint: {error}.") from error


# Exporting weights to programs that do not use dualdist.

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
    is complete. For an AveragedModel, the averages are written. Of a sharded model, the whole weights are written: they
    must fit into rank 0's host memory.

    Collective: every rank must call it; rank 0 writes. Raises CheckpointError on every rank when it cannot be written,
    TypeError when `model` is not a module.
    """

    def check() -> None:
        checked_path("path", path)
        instance("model", model, torch.nn.Module, "a torch.nn.Module")

    bare: dict[str, Any] = {}

    def export() -> None:
        write: Callable[..., Any] = _save_safetensors if Path(path).suffix == _SAFETENSORS else torch.save
        try:
            with replacing(Path(path)) as file:
                write(on_host(bare, "model"), file)
        except OSError as error:
            raise CheckpointError(f"`path` must be where a file can be written, but {error}.") from error

    on_all_ranks(check, CheckpointError)
    for name, value in _unwrapped(model).state_dict().items():
        whole = value.full_tensor() if is_dtensor(value) else value  # collective for a DTensor
        if is_writer():
            bare[name.replace(f"{_COMPILED}.", "")] = whole.cpu() if is_dtensor(value) else whole
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
