"""From the values of a checkpoint to live objects, on all ranks.

Everything that can be compared (names, shapes, kinds, parameter groups) is compared on all ranks before anything
changes. Then the objects load, so that little must be given back when one refuses its state. Plain values are set last.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
from collections.abc import Callable, Mapping, MutableMapping, Sequence, Set
from typing import Any, cast

import numpy as np
import torch

from ..core import accelerator
from ..core.checks import mapping
from ..core.collectives.objects import if_all_succeed
from ..core.lifecycle import rank, size
from ..core.training.optimizer_state import load_optimizer_state
from ..errors import CheckpointError, logger
from .contents import (
    RANKS,
    check_state,
    cloned,
    few,
    fitting_part,
    is_per_rank,
    is_stateful,
    rank_states,
    state_of,
)

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
    converted: set[int] = set()
    for name, value in [(name, state[name]) for name in state if name in values]:
        saved, load, mismatches = _of_this_rank(value, values[name])
        if not mismatches and not is_stateful(value):
            plain[name] = saved
            continue
        if not mismatches and load is None:
            load, mismatches = _fit_object(value, saved, converted)
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


def _fit_object(value: Any, saved: Any, converted: set[int]) -> tuple[Load | None, list[str]]:
    """Return what loads `saved` into `value`, None if nothing can, and what does not fit.

    converted: where the parameters of modules are that have another dtype in the file; complete when something loads.
    """
    if not isinstance(saved, Mapping):
        return None, [f"a plain {type(saved).__name__} in the file"]
    if isinstance(value, torch.nn.Module):
        return _fit_module(value, saved, converted)
    mismatches = _group_mismatches(value, saved) if isinstance(value, torch.optim.Optimizer) else []

    def load() -> None:
        groups = getattr(value, "param_groups", ()) if converted else ()
        is_converted = any(param.data_ptr() in converted for group in groups for param in group["params"])
        # If parameters are converted, torch must convert their state, too.
        if isinstance(value, torch.optim.Optimizer) and not is_converted:
            load_optimizer_state(value, dict(saved), copies=True)
        else:
            value.load_state_dict(cloned(saved))

    return None if mismatches else load, mismatches


def _fit_module(module: torch.nn.Module, saved: Mapping[str, Any], converted: set[int]) -> tuple[Load, list[str]]:
    own = state_of(module)
    fitting, mismatches = fitting_part(own, saved)
    for name, value in fitting.items():
        mine = own[name]
        if isinstance(value, torch.Tensor) and isinstance(mine, torch.Tensor) and value.dtype != mine.dtype:
            converted.add(mine.data_ptr())
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


def _group_mismatches(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> list[str]:
    groups = saved.get("param_groups", [])
    own = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in groups]
    if own != theirs:
        return [f"groups of {theirs} parameters instead of {own}"]
    return option_mismatches(optimizer, {option for group in groups for option in group})


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
