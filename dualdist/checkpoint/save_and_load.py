"""Saving and loading one file, on all ranks together."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..collectives.objects import broadcast_object, gather_object
from ..errors import CheckpointError
from ..world.numbers import backend_name, size, transport_name
from .contents.names import few
from .contents.portable import on_host
from .contents.restoration import restore
from .contents.state import check_state, collect, collect_own
from .ranks import from_writer, on_all_ranks, send_file
from .storage.filesystem import FileSystem
from .storage.format import Manifest, copy_verified, write_checkpoint
from .storage.memory import MemoryFile

__all__ = ("gather_own", "load", "make_manifest", "read_file", "read_values", "save")


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    file_system: FileSystem | None = None,
) -> None:
    """Write `state` to the file `path`, which is what it was before until the new one is complete and on the disk.

    Rank 0 writes; the other ranks need not see the folder. The file loads under any backend, transport, device, style
    and number of ranks, and with `torch.load(path, weights_only=True)`.

    Collective: every rank must call it, with objects of the same names.

    Args:
        state: names, and for each an object with `state_dict` and `load_state_dict` (models, optimizers, schedulers,
            GradScaler, AveragedModel, samplers, RandomState), or a value: tensors, numbers, strings, None, and
            lists, tuples, sets and dictionaries of them.
        step, metrics: kept in the manifest.

    Raises:
        CheckpointError: on every rank, when it could not be written.
        ValueError, TypeError: on every rank, when `state` is wrong or has other names there.
    """
    _agree_on_names(state)
    own = gather_own(state)

    def write() -> None:
        manifest = make_manifest(step, metrics or {})
        values = on_host(collect(state, own), "state")
        try:
            write_checkpoint(Path(path), values, manifest, file_system or FileSystem())
        except OSError as error:
            raise CheckpointError(
                f"Checkpoint {path} was not saved: {error}. What was there before is left as it was."
            ) from error

    from_writer(write)


def load(
    path: str | os.PathLike[str], state: Mapping[str, Any] | None = None, *, strict: bool = True
) -> dict[str, Any]:
    """Return what `save` or a manager has written to the file `path`, and give it to `state`.

    Rank 0 reads it; the other ranks need not see it. Nothing in it is run.

    Collective: every rank must call it.

    Args:
        state: as for `save`. Its objects load what is theirs, its plain values are set. None: nothing is changed.
        strict: whether names, shapes and parameter groups must all fit. False: what fits is loaded, with a warning.

    Returns:
        For each name what was saved, in host memory: the `state_dict` of an object, or the value.

    Raises:
        DamagedCheckpointError: the file is not as it was written, or holds what only running code could make.
        CheckpointError: there is none, or it does not fit `state`, which is left as it was (but for modules, when the
            `load_state_dict` of one raised). All on every rank.
    """
    if state is not None:
        _agree_on_names(state)
    with MemoryFile() as file:
        from_writer(lambda: read_file(Path(path), file))
        values = read_values(file, path)
    if state is not None:
        restore(state, values, strict=strict, origin=path)
    return values


def _agree_on_names(state: Mapping[str, Any]) -> None:
    names = on_all_ranks(lambda: check_state(state))
    for place, other in enumerate(names):
        if other != names[0]:
            differing = sorted(set(other) ^ set(names[0]))
            raise ValueError(
                f"`state` must have the same names on all ranks, but ranks 0 and {place} differ in {few(differing)}."
            )


def read_file(path: Path, file: MemoryFile) -> Manifest:
    """Copy a checkpoint into `file` and return its manifest. Local. Raises CheckpointError unless it is sound."""
    try:
        return copy_verified(path, file.write)
    except OSError as error:
        raise CheckpointError(f"`path` must be a checkpoint that can be read, but {error}.") from error


def read_values(file: MemoryFile, origin: object, root: int = 0) -> dict[str, Any]:
    """Return on every rank what the verified `file` of rank `root` holds. Collective over the world."""
    send_file(file, broadcast_object(file.size, root), root)
    values: list[dict[str, Any]] = []
    on_all_ranks(lambda: values.append(file.load(origin)))
    return values[0]


def gather_own(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return on the writer what each rank saves for itself, an empty list elsewhere. Collective over the world."""
    problem, own = None, {}
    try:
        own = on_host(collect_own(state), "state")
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    answers = gather_object((problem, own)) or []

    def check() -> None:
        for place, (problem, _) in enumerate(answers):
            if problem is not None:
                raise CheckpointError(f"Rank {place} failed: {problem}")

    from_writer(check)
    return [own for _, own in answers]


def make_manifest(step: int | None, metrics: Mapping[str, float], serial: int = 0) -> Manifest:
    """Return the manifest of a checkpoint that this world saves now. Raises TypeError for metrics without numbers."""
    return Manifest(
        step,
        size(),
        backend_name(),
        transport_name(),
        str(torch.__version__),
        datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        serial,
        {name: float(value) for name, value in metrics.items()},
    )
