"""Saving and loading one file, on all ranks together."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

from ..agreement import call_kinds
from ..checks import converted, flag, instance, integer, items, mapping, text, wrong
from ..checks import path as checked_path
from ..collectives.objects import on_all_ranks
from ..errors import CheckpointError
from ..world.process_sets import reporting
from .contents import check_state, collect, few, on_host
from .files import FileSystem
from .format import MemoryFile, make_manifest, write_checkpoint
from .restoration import restore
from .transfer import from_writer, gather_own, read_file, read_values

# Checks of arguments that several functions of this package share.

_NOT_HANDLED = (signal.SIGKILL, signal.SIGSTOP)
"""Signals for which the system allows no handler."""


def checked_strict(strict: Any) -> bool:
    """Return `strict` as a bool."""
    return flag("strict", strict)


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


def check_file_system(file_system: Any) -> None:
    """Raise TypeError unless `file_system` is a FileSystem or None."""
    instance("file_system", file_system, (FileSystem, type(None)), "a FileSystem or None")


def check_signals(signals: Any) -> None:
    """Raise TypeError or ValueError unless a handler can be installed for each of `signals`."""
    fix = "Pass signals such as (signal.SIGTERM,), or ()."
    for place, number in enumerate(items("signals", signals, "a list of signals", fix)):
        name = f"signals[{place}]"
        if integer(name, number, fix=fix) not in signal.valid_signals() or number in _NOT_HANDLED:
            raise wrong(name, "a signal that can be handled", int(number), fix)


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    file_system: FileSystem | None = None,
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
        check_file_system(file_system)
        checked_metrics(metrics)
        if step is not None:
            integer("step", step, least=0)

    _agree_on_names(state, check)
    own = gather_own(state)

    def write() -> None:
        manifest = make_manifest(None if step is None else int(step), checked_metrics(metrics))
        values = on_host(collect(state, own), "state")
        try:
            write_checkpoint(checked_path("path", path), values, manifest, file_system or FileSystem())
        except OSError as error:
            raise CheckpointError(
                f"Checkpoint {path} was not saved: {error}. An older file of that name is unchanged."
            ) from error

    from_writer(write)


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
            the `load_state_dict` of a module raised. All errors are raised on every rank.
    """
    with reporting(call_kinds.BROADCAST_OBJECT):
        strict = checked_strict(strict)
    if state is not None:
        _agree_on_names(state)
    with MemoryFile() as file:
        from_writer(lambda: read_file(checked_path("path", path), file))
        values = read_values(file, path)
    if state is not None:
        restore(state, values, strict=strict, origin=path)
    return values


def _agree_on_names(state: Mapping[str, Any], check: Callable[[], None] = lambda: None) -> None:
    """Raise an error on every rank if `check` raises on one, or the names in `state` differ. Collective."""

    def checked() -> list[str]:
        check()
        return check_state(state)

    names = on_all_ranks(checked, CheckpointError)
    for place, other in enumerate(names):
        if other != names[0]:
            differing = sorted(set(other) ^ set(names[0]))
            raise ValueError(
                f"`state` must have the same names on all ranks, but ranks 0 and {place} differ in {few(differing)}."
            )
