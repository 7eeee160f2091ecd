"""Saving and loading one file, on all ranks together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..agreement import call_kinds
from ..checks import converted, flag, integer, mapping, text
from ..checks import path as checked_path
from ..errors import CheckpointError
from ..world.process_sets import reporting
from .catalog import CatalogEntry
from .contents import on_host
from .format import MemoryFile, copy_verified, make_manifest, write_checkpoint
from .restoration import restore
from .transfer import is_writer, receive_newest, write_state


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
    with reporting(call_kinds.ALLGATHER_OBJECT):
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
