"""From live objects to the values in a file, and back.

The writer's objects are saved, since data-parallel ranks hold equal ones; of an object with `per_rank = True` every
rank's state is. All that does not fit is found before anything is changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from ..errors import CheckpointError
from .names import few, fit
from .portable import cloned

__all__ = ("apply", "check_state", "collect", "collect_own")

logger = logging.getLogger("dualdist")

_RANKS = "per_rank"


def is_stateful(value: Any) -> bool:
    """Return whether `value` is saved through its `state_dict`."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


def is_per_rank(value: Any) -> bool:
    """Return whether every rank's state of `value` is saved."""
    return is_stateful(value) and getattr(value, "per_rank", False) is True


def check_state(state: Any) -> None:
    """Raise TypeError unless `state` can be saved and restored."""
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise TypeError(
            f"`state` must be a dictionary from names to objects and values, but is {state!r} instead."
        )
    plain = [name for name, value in state.items() if not is_stateful(value)]
    if plain and not isinstance(state, MutableMapping):
        raise TypeError(
            f"`state` must be a dictionary that can be changed, since restoring sets {few(plain)} in it, but is a "
            f"{type(state).__name__} instead."
        )


def collect_own(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what this rank must hand to the writer."""
    return {name: value.state_dict() for name, value in state.items() if is_per_rank(value)}


def collect(state: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what goes into the file, not portable yet. own: what every rank's `collect_own` returned."""
    values = {}
    for name, value in state.items():
        if is_per_rank(value):
            values[name] = {_RANKS: [states[name] for states in own]}
        else:
            values[name] = value.state_dict() if is_stateful(value) else value
    return values


def apply(
    state: Mapping[str, Any], values: Mapping[str, Any], *, strict: bool, rank: int, origin: object
) -> None:
    """Give the objects of `state` their part of `values`, and set its plain values.

    strict: False loads what fits, and warns of the rest. origin: the file, for messages. Raises CheckpointError, before
    anything is changed unless it comes from an object's own `load_state_dict`.
    """
    plans, problems = {}, _of_names(state, values)
    for name in [name for name in state if name in values]:
        plans[name], misfits = _plan(state[name], values[name], rank)
        problems += [f"`{name}` has {' and '.join(misfits)}"] if misfits else []
    if problems and strict:
        raise CheckpointError(
            f"Checkpoint {origin} must fit the state, but does not: {'; '.join(problems)}. Pass strict=False to load "
            "what fits."
        )
    if problems:
        logger.warning("Checkpoint %s fits in part: %s.", origin, "; ".join(problems))
    for name, plan in plans.items():
        try:
            plan(state, name)
        except Exception as error:
            raise CheckpointError(f"`{name}` could not load its state from {origin}: {error!r}") from error


Plan = Callable[[Any, str], None]


def _of_names(state: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    missing = [f"`{name}`" for name in state if name not in values]
    unexpected = [f"`{name}`" for name in values if name not in state]
    told = [f"it has no {few(missing)}"] if missing else []
    return told + ([f"it has {few(unexpected)}, which the state has not"] if unexpected else [])


def _plan(value: Any, saved: Any, rank: int) -> tuple[Plan, list[str]]:
    """Return how to load `saved`, and what does not fit."""
    if not is_stateful(value):
        return lambda state, name: state.__setitem__(name, cloned(saved)), []
    if not isinstance(saved, Mapping):
        return _nothing, [f"a plain {type(saved).__name__} in the file"]
    if is_per_rank(value):
        return _plan_per_rank(value, saved, rank)
    if isinstance(value, torch.nn.Module):
        return _plan_module(value, saved)
    misfits = _of_groups(value, saved) if isinstance(value, torch.optim.Optimizer) else []
    return (lambda state, name: value.load_state_dict(cloned(saved))) if not misfits else _nothing, misfits


def _nothing(state: Any, name: str) -> None:
    """Load nothing, of what does not fit."""


def _plan_module(module: torch.nn.Module, saved: Mapping[str, Any]) -> tuple[Plan, list[str]]:
    fitting, misfits = fit(module.state_dict(), saved)
    if hasattr(saved, "_metadata") and fitting.keys() == saved.keys():
        fitting = saved  # type: ignore[assignment] # with the versions of its parts
    return lambda state, name: _loaded(module.load_state_dict(fitting, strict=not misfits)), misfits


def _loaded(result: Any) -> None:
    """Take what load_state_dict returns: the names that are known to be missing."""


def _plan_per_rank(value: Any, saved: Mapping[str, Any], rank: int) -> tuple[Plan, list[str]]:
    states = saved.get(_RANKS)
    if not isinstance(states, list) or not states:
        return _nothing, ["no states of single ranks in the file"]
    if rank < len(states):
        return lambda state, name: value.load_state_dict(cloned(states[rank])), []
    derive = getattr(value, "load_derived", None)
    if derive is None:
        return _nothing, [
            f"{len(states)} ranks' states in the file, none for rank {rank}, and no load_derived()"
        ]
    return lambda state, name: derive(cloned(states), rank), []


def _of_groups(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> list[str]:
    own = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in saved.get("param_groups", [])]
    return [f"groups of {theirs} parameters instead of {own}"] if own != theirs else []
