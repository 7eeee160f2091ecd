"""Saving and loading one file, on all ranks together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.optim.swa_utils import AveragedModel

from ..core.checks import converted, flag, instance, integer, is_dtensor, mapping, text, text_of
from ..core.checks import path as checked_path
from ..core.collectives.broadcast import broadcast_
from ..core.collectives.join import barrier
from ..core.collectives.objects import (
    ALLGATHER_OBJECT,
    allgather_object,
    attempted,
    if_all_succeed,
    on_all_ranks,
)
from ..core.lifecycle import rank, size
from ..core.training.parallel import SynchronizedModule
from ..core.world import current, reporting
from ..errors import CheckpointError, DamagedCheckpointError, logger
from ..rooted_collectives import gather_object
from .catalog import CatalogEntry, Find
from .contents import bare_names, check_state, collect, collect_compared, collect_own, digest, few, on_host
from .format import MemoryFile, copy_verified, make_manifest, replacing, write_checkpoint
from .restoration import load_into

T = TypeVar("T")

# How states and files move between the ranks that see the disk, mostly rank 0 alone, and all other ranks.


def outcomes(function: Callable[[], T] | None) -> list[Any]:
    """Run `function` on the ranks that pass one, and return every rank's result, in rank order.

    Collective over the world. The results are sent by pickle, so they must be small. When `function` raises on a rank,
    every rank raises the same CheckpointError, or DamagedCheckpointError if `function` did. (`on_all_ranks` raises each
    rank's own exception: use it for arguments, which may be wrong on some ranks only.)
    """
    result, failure = (None, None) if function is None else attempted(function)
    text = reported(failure, rank())
    # Of these two classes only: the other ranks must be able to unpickle it.
    kind = DamagedCheckpointError if isinstance(failure, DamagedCheckpointError) else CheckpointError
    gathered = allgather_object((result, None if text is None else kind(text)))
    for _, error in gathered:
        if error is not None:
            raise error from failure
    return [result for result, _ in gathered]


def reported(failure: Exception | None, rank: int) -> str | None:
    """Return the text of the error that the other ranks raise because of the `failure` of `rank`; None without one."""
    if failure is None or isinstance(failure, CheckpointError):
        return None if failure is None else text_of(failure)
    return f"Rank {rank} failed: {type(failure).__name__}: {text_of(failure)}"


def is_writer() -> bool:
    """Return whether this rank, rank 0, writes and reads the files."""
    return rank() == 0


def from_writer(function: Callable[[], T]) -> T:
    """Run `function` on the writer, and return its result on every rank. Collective, with errors as for `outcomes`."""
    result: T = outcomes(function if is_writer() else None)[0]
    return result


def write_state(
    state: Mapping[str, Any],
    write: Callable[[dict[str, Any]], T],
    check: Callable[[], object] = lambda: None,
) -> T:
    """Collect the values of `state` on the writer, call `write` with them there, and return its result on every rank.

    Collective over the world. States that differ between ranks are collected from all, after their digests.

    check: raises an error if another argument is wrong on this rank.

    Raises the error of `check`, and TypeError when `state` is wrong, on this rank, CheckpointError on the others;
    ValueError on every rank when the names in `state` differ; otherwise errors as for `outcomes`.
    """

    def checked() -> list[str]:
        check()
        return check_state(state)

    names, refusal = attempted(checked)
    own: dict[str, Any] = {}
    digests: dict[str, str] = {}
    taken = dict(state) if refusal is None else {}

    def take() -> None:
        own.update(on_host(collect_own(state, writes=is_writer()), "state"))
        compared = collect_compared(state) if size() > 1 else {}
        digests.update({name: digest(value, f"state[{name!r}]") for name, value in compared.items()})
        taken.update(compared)

    def send_and_write(failure: Exception | None) -> tuple[str, list[str], T | None]:
        shares = gather_object((names, own, digests, reported(failure, rank()))) or []
        return from_writer(lambda: _write_shares(shares, taken, write))

    try:
        mismatch, differing, result = send_and_write(refusal or attempted(take)[1])
        if differing:
            states = {name: taken[name] for name in differing if name not in own}
            sent, failure = attempted(lambda: on_host(collect(states, []), "state"))
            own.update(sent or {})
            mismatch, _, result = send_and_write(failure)
    except CheckpointError:
        if refusal is not None:
            raise refusal from None
        raise
    if mismatch:
        raise ValueError(f"`state` must have the same names on all ranks, but {mismatch}.")
    return cast(T, result)


def _write_shares(
    shares: Sequence[Any], taken: Mapping[str, Any], write: Callable[[dict[str, Any]], T]
) -> tuple[str, list[str], T | None]:
    """Return how names differ, or which states every rank must send first, or what `write` returns."""
    names, own, digests, _ = shares[0]
    for place, (others, _, _, problem) in enumerate(shares):
        if problem is not None:
            raise CheckpointError(problem)
        if others != names:
            return f"ranks 0 and {place} differ in {few(sorted({*names} ^ {*others}))}", [], None
    differing = [name for name in digests if any(share[2].get(name) != digests[name] for share in shares)]
    if not own.keys() >= set(differing):
        return "", differing, None
    if differing:
        logger.warning(
            "%s differs between ranks, so the checkpoint has the state of each, and loads on %d ranks only. An object "
            "says by `per_rank = True` that this is meant, and by `per_rank = False` that rank 0's serves all.",
            few([f"`{name}`" for name in differing]),
            len(shares),
        )
    return "", [], write(collect(taken, [share[1] for share in shares], differing))


_PIECE_BYTES = 32 << 20


def receive_checkpoint(find: Find | None) -> tuple[int, CatalogEntry, dict[str, Any]] | None:
    """Load on every rank the checkpoint that one finds, the newest if several do. Collective over the world.

    Each host holds the file in memory once.

    find: None on ranks that do not look.

    Returns the rank that has found it, its entry and its values; None when no rank has found any. Errors as for
    `outcomes`, and DamagedCheckpointError when it cannot be loaded on this rank.
    """
    with MemoryFile() as file:
        found = outcomes(lambda: (None if find is None else find(file), file.address()))
        serials = [-1 if entry is None else entry.manifest.serial for entry, _ in found]
        root = serials.index(max(serials))
        entry: CatalogEntry | None = found[root][0]
        if entry is None:
            return None
        _send_file(file, [address for _, address in found], root)
        return root, entry, if_all_succeed(lambda: file.load(entry.path), CheckpointError)


def _send_file(file: MemoryFile, addresses: Sequence[tuple[str, os.stat_result]], root: int) -> None:
    """Copy the `file` of rank `root` to all hosts, in pieces of 32 MiB.

    On each host one rank keeps it, and the others use that rank's file. A rank that cannot open it keeps its own.
    """
    hosts = current().hosts
    keeper = root if hosts[root] == hosts[rank()] else hosts.index(hosts[rank()])
    is_kept = rank() != root and (rank() == keeper or not file.become(*addresses[keeper]))
    if is_kept:
        file.clear()
    end = addresses[root][1].st_size
    for start in range(0, end, _PIECE_BYTES):
        count = min(_PIECE_BYTES, end - start)
        piece = bytearray(os.pread(file.fileno(), count, start)) if rank() == root else bytearray(count)
        broadcast_(torch.frombuffer(piece, dtype=torch.uint8), root)
        if is_kept:
            file.append(piece)
    barrier()  # the files are complete


# Saving and loading.


def checked_metrics(metrics: Any) -> Mapping[str, float]:
    """Return `metrics` with its values as floats, which may be NaN; None: no metrics."""
    fix = 'Pass a dictionary, such as {"accuracy": 0.9}.'
    checked = {}
    for name, value in mapping("metrics", {} if metrics is None else metrics, fix=fix).items():
        text("metrics", name, fix)
        place = f"metrics[{name!r}]"
        checked[name] = converted(place, value, float, "a number", "Pass a float.", without=bool | str | bytes)
    return checked


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Write `state` to the file `path`. The old file stays until the new one is complete and on the disk.

    Rank 0 writes; the other ranks need not see the folder. The file loads under any backend, transport, device, wrapper
    and number of ranks, and with `torch.load(path, weights_only=True)`.

    Collective: every rank must call it, with objects of the same names.

    Args:
        state: for each name an object with `state_dict` and `load_state_dict` (models, optimizers, schedulers,
            GradScaler, AveragedModel, samplers, RandomState), or a value: tensors, numbers, strings, None, and
            lists, tuples, sets and dictionaries of them. What differs between ranks is saved from each, with a
            warning, except models, optimizers and values of floats alone, such as losses: rank 0's are saved.
        step, metrics: stored in the manifest.

    Raises:
        CheckpointError: on every rank, when a value cannot be saved, or the file could not be written.
        ValueError: on every rank, when the names in `state` differ between ranks.
        ValueError, TypeError: an argument is wrong on this rank; the others raise CheckpointError.
    """

    noted: dict[str, Any] = {}

    def check() -> None:
        noted["metrics"] = checked_metrics(metrics)
        noted["step"] = None if step is None else integer("step", step, least=0)

    def write(values: dict[str, Any]) -> None:
        try:
            write_checkpoint(checked_path("path", path), on_host(values, "state"), make_manifest(**noted))
        except OSError as error:
            raise CheckpointError(
                f"Checkpoint {path} was not saved: {error}. An older file of that name is unchanged."
            ) from error

    write_state(state, write, check)


def load(
    path: str | os.PathLike[str],
    state: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
    partial: bool = False,
) -> dict[str, Any]:
    """Return the values in the file `path`, which `save` or a manager has written, and load them into `state`.

    Rank 0 reads the file; the other ranks need not see it. No code in it is run.

    Collective: every rank must call it.

    Args:
        state: as for `save`. Its objects load their states, and its plain values are set. None: nothing is changed.
        strict: whether names, shapes and parameter groups must all fit. False: what fits is loaded, with a warning.
        partial: whether to ignore names in the file that `state` does not have, such as the optimizer's.

    Returns:
        For each name the saved value, in host memory: the `state_dict` of an object, or the plain value. Of what
        differed between ranks: {"per_rank": [...]}, with the values of all ranks.

    Raises:
        DamagedCheckpointError: the file is not as it was written, or cannot be loaded without running code in it.
        CheckpointError: there is no file, or it does not fit `state`. Then `state` is unchanged, except modules when
            the `load_state_dict` of a module or an optimizer raised. All errors are raised on every rank.
    """
    with reporting(ALLGATHER_OBJECT):
        strict, partial = flag("strict", strict), flag("partial", partial)
    found = receive_checkpoint((lambda file: read_into(path, file)) if is_writer() else None)
    assert found is not None  # else `find` has raised
    _, _, values = found
    if state is not None:
        load_into(state, values, strict=strict, partial=partial, origin=path)
    return values


def read_into(
    path: str | os.PathLike[str], file: MemoryFile, file_of: Callable[[Path], Path] = lambda path: path
) -> CatalogEntry:
    """Copy the checkpoint `path` into `file`, and return its entry. Raises CheckpointError when it is damaged.

    file_of: as that of a Catalog.
    """
    checked = checked_path("path", path)
    try:
        return CatalogEntry(checked, copy_verified(file_of(checked), file.append))
    except OSError as error:
        raise CheckpointError(f"`path` could not be read as a checkpoint: {error}.") from error


# Exporting weights to programs that do not use dualdist.

_SAFETENSORS = ".safetensors"
_WRAPPER_CLASSES = (
    AveragedModel,
    SynchronizedModule,
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

    Collective; rank 0 writes. All raise CheckpointError if it cannot be written, TypeError if `model` is no module.
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
    weights = model.state_dict()
    for name, part in model.named_modules(remove_duplicate=False):
        if isinstance(part, AveragedModel):
            weights.pop(f"{name}.n_averaged".lstrip("."), None)
    for name, value in bare_names(model, weights, _wrapped_attribute).items():
        whole = value.full_tensor() if is_dtensor(value) else value  # collective for a DTensor
        if is_writer():
            bare[name] = whole.cpu() if is_dtensor(value) else whole
    from_writer(export)


def _wrapped_attribute(part: torch.nn.Module) -> str:
    return "module" if isinstance(part, _WRAPPER_CLASSES) else _COMPILED if hasattr(part, _COMPILED) else ""


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
