"""Saving and loading one file, on all ranks together."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
from collections.abc import Callable, Mapping, MutableMapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel

from ..core import accelerator
from ..core.checks import converted, flag, instance, integer, is_dtensor, mapping, text, text_of
from ..core.checks import path as checked_path
from ..core.collectives.broadcast import broadcast_
from ..core.collectives.join import barrier
from ..core.collectives.objects import ALLGATHER_OBJECT, allgather_object, attempted, if_all_succeed, on_all_ranks
from ..core.lifecycle import rank, size
from ..core.training.optimizer_state import load_optimizer_state
from ..core.training.parallel import SynchronizedModule
from ..core.world import current, reporting
from ..errors import CheckpointError, DamagedCheckpointError, logger
from ..rooted_collectives import gather_object
from .catalog import CatalogEntry, Find
from .contents import (
    RANKS,
    bare_names,
    check_state,
    cloned,
    collect,
    collect_compared,
    collect_own,
    digest,
    few,
    fitting_part,
    is_per_rank,
    is_stateful,
    on_host,
    rank_states,
    state_of,
)
from .format import MemoryFile, copy_verified, make_manifest, replacing, write_checkpoint

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
    state: Mapping[str, Any], write: Callable[[dict[str, Any]], T], check: Callable[[], object] = lambda: None
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

    own: dict[str, Any] = {}
    digests: dict[str, str] = {}
    taken: dict[str, Any] = {}

    def take() -> None:
        taken.update(state)
        own.update(on_host(collect_own(state, writes=is_writer()), "state"))
        compared = collect_compared(state) if size() > 1 else {}
        digests.update({name: digest(value, f"state[{name!r}]") for name, value in compared.items()})
        taken.update(compared)

    def take_differing() -> None:
        own.update(on_host(collect({name: taken[name] for name in differing if name not in own}, []), "state"))

    def send_and_write(failure: Exception | None) -> tuple[str, list[str], T | None]:
        shares = gather_object((names, own, digests, reported(failure, rank()))) or []
        return from_writer(lambda: _write_shares(shares, taken, write))

    names, refusal = attempted(checked)
    try:
        mismatch, differing, result = send_and_write(refusal or attempted(take)[1])
        if differing:
            mismatch, _, result = send_and_write(attempted(take_differing)[1])
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
    if not own.keys() >= {*differing}:
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


# The states of the random number generators of this process: those of Python, NumPy and torch.


class RandomState:
    """The global generators of Python's `random`, NumPy and torch, and that of this process's accelerator.

    Every rank saves its own state and loads it again. In a larger world, a rank without a saved state is seeded from
    the state of rank `rank % saved` and its own rank. Its numbers then differ from every other rank's, and are the same
    each time this checkpoint is loaded. In a smaller world, the states of the missing ranks are not used.

    `iter(DataLoader(...))` draws one number from torch's generator, unless the loader has its own `generator=`. Give it
    one: otherwise a run that resumes inside an epoch draws one number more than a run without interruption.
    """

    per_rank = True
    """Makes `dualdist.checkpoint` save the state of every rank. Any object may have this and `load_derived`.

    False: that of rank 0 is saved and loaded, and not compared with the others.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return this process's state, in values that `torch.load(weights_only=True)` accepts."""
        kind, keys, *rest = np.random.get_state(legacy=True)
        state = {
            "python": random.getstate(),
            "numpy": (str(kind), torch.from_numpy(keys.astype(np.int64)), *rest),  # type: ignore[union-attr]
            "torch": torch.get_rng_state(),
        }
        if accelerator.is_started():
            state[str(accelerator.kind())] = accelerator.module().get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. An accelerator's generator without a saved state is seeded from torch's state."""
        mapping("state", state, "python", "numpy", "torch", fix="Pass what state_dict() has returned.")
        random.setstate(state["python"])
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys.tolist(), np.uint32), *rest))
        torch.set_rng_state(state["torch"].clone())
        kind = accelerator.kind()
        if kind in state:
            accelerator.module().set_rng_state(state[kind].clone())
        elif kind is not None:
            accelerator.module().manual_seed(_seed(state, 0))

    def load_derived(self, states: Sequence[dict[str, Any]], rank: int) -> None:
        """Seed a rank that has no state in `states`."""
        seed = _seed(states[rank % len(states)], rank)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)


def _seed(state: dict[str, Any], rank: int) -> int:
    data = bytes(state["torch"].tolist()) + repr(state["python"]).encode() + rank.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(data).digest()[:7], "little")


# From the values of a checkpoint to live objects, on all ranks.
#
# Everything that can be compared (names, shapes, kinds, parameter groups) is compared on all ranks before anything
# changes. Then the objects load, so that little must be given back when one refuses its state. Plain values come last.

_ADDED_OPTIONS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "param_names"}
"""Options that schedulers of torch.optim and named parameters add to the groups of any optimizer."""

Load = Callable[[], object]


def load_into(
    state: Mapping[str, Any], values: Mapping[str, Any], *, strict: bool, partial: bool = False, origin: Any
) -> None:
    """Load the objects of `state` from `values`, and set its plain values. Collective over the world.

    strict: False loads what fits, and warns. partial: ignore names that only the file has. origin: for messages.

    Raises CheckpointError on every rank, TypeError on this rank when `state` is wrong. Then everything is as before,
    except modules when the `load_state_dict` of a module or an optimizer raised.
    """
    plain, loads = if_all_succeed(lambda: _fitted(state, values, strict, partial, origin), CheckpointError)
    former: dict[str, Any] = {}

    def load(kind: type) -> None:
        for name, function in loads[kind].items():
            if kind is object:
                with contextlib.suppress(Exception):  # the user's class may raise anything
                    former[name] = cloned(state[name].state_dict())
            try:
                function()
            except Exception as error:
                raise CheckpointError(f"`{name}` could not load its state from {origin}: {error!r}") from error

    try:
        for kind in _ORDER:
            if_all_succeed(functools.partial(load, kind), CheckpointError)
    except BaseException:  # also when another rank has ended
        for name, saved in former.items():
            try:
                state[name].load_state_dict(saved)
            except Exception as error:
                logger.error("`%s` could not be restored to its former state: %s", name, error)
        raise
    if plain:
        plain = {name: cloned(value) for name, value in plain.items()}
        cast("MutableMapping[str, Any]", state).update(plain)


_ORDER = (object, torch.nn.Module, torch.optim.Optimizer)
"""The classes of the objects that load one after the other, when all ranks have loaded those before.

Modules and optimizers have been compared, and are too large for a copy of their former states. Any other object may
refuse a state for reasons of its own, so these load first.
"""


def _fitted(
    state: Mapping[str, Any], values: Mapping[str, Any], strict: bool, partial: bool, origin: object
) -> tuple[dict[str, Any], dict[type, dict[str, Load]]]:
    """Return the plain values that fit, and what loads the objects that fit, by their classes in _ORDER.

    If not everything fits: raise CheckpointError if `strict`, else warn.
    """
    plain: dict[str, Any] = {}
    loads: dict[type, dict[str, Load]] = {kind: {} for kind in _ORDER}
    check_state(state)
    missing = [f"`{name}`" for name in state if name not in values]
    unexpected = [f"`{name}`" for name in values if name not in state and not partial]
    problems = [f"it has no {few(missing)}"] if missing else []
    problems += [f"it has {few(unexpected)}, which the state does not have"] if unexpected else []
    retyped: set[int] = set()
    for name, value in [(name, state[name]) for name in state if name in values]:
        saved, load, mismatches = _of_this_rank(value, values[name])
        if not mismatches and not is_stateful(value):
            plain[name] = saved
            continue
        if not mismatches and load is None:
            load, mismatches = _fit_object(value, saved, retyped)
        problems += [f"`{name}` has {' and '.join(mismatches)}"] if mismatches else []
        if load is not None:
            loads[next(kind for kind in reversed(_ORDER) if isinstance(value, kind))][name] = load
    report_mismatches(problems, origin, strict=strict)
    return plain, loads


def report_mismatches(problems: Sequence[str], origin: object, *, strict: bool) -> None:
    """If there are `problems`, raise CheckpointError if `strict`, else warn of them."""
    if problems and strict:
        raise CheckpointError(
            f"Checkpoint {origin} must fit the state, but does not: {'; '.join(problems)}. Pass partial=True to "
            "ignore names that only the file has, or strict=False to load what fits."
        )
    if problems:
        logger.warning("Checkpoint %s does not fit completely: %s.", origin, "; ".join(problems))


def _fit_object(value: Any, saved: Any, retyped: set[int]) -> tuple[Load | None, list[str]]:
    """Return what loads `saved` into `value`, None if nothing can, and what does not fit.

    retyped: where the parameters of modules are that have another dtype in the file; complete when something loads.
    """
    if not isinstance(saved, Mapping):
        return None, [f"a plain {type(saved).__name__} in the file"]
    if isinstance(value, torch.nn.Module):
        return _fit_module(value, saved, retyped)
    mismatches: list[str] = []
    if isinstance(value, torch.optim.Optimizer):
        groups = saved.get("param_groups", [])
        own, theirs = ([len(group["params"]) for group in each] for each in (value.param_groups, groups))
        mismatches = option_mismatches(value, {option for group in groups for option in group})
        if own != theirs:
            mismatches = [f"groups of {theirs} parameters instead of {own}"]

    def load() -> None:
        groups = getattr(value, "param_groups", ()) if retyped else ()
        is_retyped = any(param.data_ptr() in retyped for group in groups for param in group["params"])
        # If parameters are converted, torch must convert their state, too.
        if isinstance(value, torch.optim.Optimizer) and not is_retyped:
            load_optimizer_state(value, dict(saved), copies=True)
        else:
            value.load_state_dict(cloned(saved))

    return None if mismatches else load, mismatches


def _fit_module(module: torch.nn.Module, saved: Mapping[str, Any], retyped: set[int]) -> tuple[Load, list[str]]:
    own = state_of(module)
    fitting, mismatches = fitting_part(own, saved)
    for name, value in fitting.items():
        mine = own[name]
        if isinstance(value, torch.Tensor) and isinstance(mine, torch.Tensor) and value.dtype != mine.dtype:
            retyped.add(mine.data_ptr())
    if hasattr(saved, "_metadata") and fitting.keys() == saved.keys():
        # `saved` has the versions of the submodules, too.
        fitting = saved  # type: ignore[assignment]
    return lambda: module.load_state_dict(fitting, strict=not mismatches), mismatches


def _of_this_rank(value: Any, saved: Any) -> tuple[Any, Load | None, list[str]]:
    """Return what this rank loads of `saved`; what derives it from the states of other ranks; and what does not fit."""
    states, derive = rank_states(saved), cast(Any, getattr(value, "load_derived", None))
    if states is None:
        return saved, None, ["no state for each rank in the file"] if is_per_rank(value) else []
    if getattr(value, RANKS, None) is False:
        return states[0], None, []
    if derive is None and len(states) != size():
        fix = ", and neither load_derived() nor per_rank = False" * is_stateful(value)
        return saved, None, [f"the states of {len(states)} ranks in the file, not of {size()}{fix}"]
    if rank() < len(states):
        return states[rank()], None, []
    return saved, lambda: derive(cloned(states), rank()), []


def option_mismatches(optimizer: torch.optim.Optimizer, saved: Set[str]) -> list[str]:
    """Return what is wrong if the hyperparameters `saved` are those of another class than that of `optimizer`."""
    # Another version of torch may have more or fewer options. Unknown and missing ones together mean another class.
    known = {option for group in optimizer.param_groups for option in group} | _ADDED_OPTIONS
    unknown = sorted(saved - known)
    missing = sorted(set(optimizer.defaults) - saved)
    if unknown and missing:
        return [
            f"the state of another class of optimizer than {type(optimizer).__name__}, with {few(unknown)} and without "
            f"{few(missing)}"
        ]
    return []


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

    def check() -> tuple[int | None, Mapping[str, float]]:
        return None if step is None else integer("step", step, least=0), checked_metrics(metrics)

    def write(values: dict[str, Any]) -> None:
        try:
            write_checkpoint(checked_path("path", path), on_host(values, "state"), make_manifest(*check()))
        except OSError as error:
            raise CheckpointError(
                f"Checkpoint {path} was not saved: {error}. An older file of that name is unchanged."
            ) from error

    write_state(state, write, check)


def load(
    path: str | os.PathLike[str], state: Mapping[str, Any] | None = None, *, strict: bool = True, partial: bool = False
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
_WRAPPER_CLASSES = (AveragedModel, SynchronizedModule, torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
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
