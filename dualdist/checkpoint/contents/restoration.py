"""From the values of a file to live objects, on all ranks or on none.

All that does not fit is found before anything is changed. Then objects load first, while what they had is kept and can
be given back. Modules come after them, since a copy of what they hold would cost as much memory again: their names and
shapes are known to fit by then. Plain values come last.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from ...errors import CheckpointError
from ...world.numbers import rank
from ..ranks import on_all_ranks
from .names import few, fit
from .portable import cloned
from .state import RANKS, is_per_rank, is_stateful

__all__ = ("Restoration", "restore")

logger = logging.getLogger("dualdist")

_ADDED_TO_GROUPS = {
    "initial_lr",
    "max_lr",
    "min_lr",
    "base_momentum",
    "max_momentum",
    "swa_lr",
    "param_names",
}
"""What the schedulers of torch.optim and parameters with names put into the groups of any optimizer."""

Load = Callable[[], object]


def restore(state: Mapping[str, Any], values: Mapping[str, Any], *, strict: bool, origin: object) -> None:
    """Give the objects of `state` their part of `values`, and set its plain values. Collective over the world.

    strict: False loads what fits, and warns of the rest. origin: the file, for messages. Raises CheckpointError on
    every rank, with everything as it was before, but for modules when it comes from the `load_state_dict` of one.
    """
    found: list[Restoration] = []
    on_all_ranks(lambda: found.append(Restoration(state, values, strict=strict, rank=rank(), origin=origin)))
    own = found[0]
    try:
        on_all_ranks(own.load_objects)
        on_all_ranks(own.load_modules)
    except BaseException:  # also when a rank has ended meanwhile
        own.undo()
        raise
    own.set_plain()


class Restoration:
    """How one rank's objects and values get theirs."""

    def __init__(
        self, state: Mapping[str, Any], values: Mapping[str, Any], *, strict: bool, rank: int, origin: object
    ) -> None:
        """Find what fits, changing nothing. Raises CheckpointError when not all does, if `strict`; else warns."""
        self._state = state
        self._origin = origin
        self._objects: dict[str, Load] = {}
        self._modules: dict[str, Load] = {}
        self._plain: dict[str, Any] = {}
        self._former: dict[str, Any] = {}
        """What objects had before they were loaded, of those that can tell."""
        self._begun: list[str] = []
        problems = _of_names(state, values)
        for name in [name for name in state if name in values]:
            misfits = self._plan(name, values[name], rank)
            problems += [f"`{name}` has {' and '.join(misfits)}"] if misfits else []
        if problems and strict:
            raise CheckpointError(
                f"Checkpoint {origin} must fit the state, but does not: {'; '.join(problems)}. Pass strict=False to "
                "load what fits."
            )
        if problems:
            logger.warning("Checkpoint %s fits in part: %s.", origin, "; ".join(problems))

    def load_objects(self) -> None:
        """Load all but modules and plain values. Raises CheckpointError; call `undo` then."""
        for name in self._objects:
            with contextlib.suppress(Exception):  # the user's class decides when it can tell
                self._former[name] = _copied(self._state[name])
        for name, load in self._objects.items():
            self._begun.append(name)
            with self._named(name):
                load()

    def load_modules(self) -> None:
        """Load the modules. Raises CheckpointError; call `undo` then."""
        for name, load in self._modules.items():
            with self._named(name):
                load()

    def set_plain(self) -> None:
        """Set the plain values."""
        if isinstance(self._state, MutableMapping):
            self._state.update({name: cloned(value) for name, value in self._plain.items()})

    def undo(self) -> None:
        """Give the objects that have begun to load back what they had."""
        for name in self._begun:
            try:
                if name not in self._former:
                    raise RuntimeError("its state_dict() failed before")
                self._state[name].load_state_dict(self._former[name])
            except Exception as error:  # as in _named
                logger.error("`%s` could not be brought back to what it was: %s", name, error)

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the user's class decides what its methods raise
            raise CheckpointError(
                f"`{name}` could not load its state from {self._origin}: {error!r}"
            ) from error

    def _plan(self, name: str, saved: Any, rank: int) -> list[str]:
        """Note how to load `saved`, and return what does not fit."""
        value = self._state[name]
        if not is_stateful(value):
            self._plain[name] = saved
            return []
        if not isinstance(saved, Mapping):
            return [f"a plain {type(saved).__name__} in the file"]
        if isinstance(value, torch.nn.Module) and not is_per_rank(value):
            self._modules[name], misfits = _plan_module(value, saved)
            return misfits
        load, misfits = (
            _plan_per_rank(value, saved, rank) if is_per_rank(value) else _plan_object(value, saved)
        )
        if load is not None:
            self._objects[name] = load
        return misfits


def _copied(value: Any) -> Any:
    """Return a copy of the state of `value`; of an optimizer the state itself, since loading one replaces it."""
    state = value.state_dict()
    return state if isinstance(value, torch.optim.Optimizer) else cloned(state)


def _of_names(state: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    missing = [f"`{name}`" for name in state if name not in values]
    unexpected = [f"`{name}`" for name in values if name not in state]
    told = [f"it has no {few(missing)}"] if missing else []
    return told + ([f"it has {few(unexpected)}, which the state has not"] if unexpected else [])


def _plan_module(module: torch.nn.Module, saved: Mapping[str, Any]) -> tuple[Load, list[str]]:
    fitting, misfits = fit(module.state_dict(), saved)
    if hasattr(saved, "_metadata") and fitting.keys() == saved.keys():
        fitting = saved  # type: ignore[assignment] # with the versions of its parts
    return lambda: module.load_state_dict(fitting, strict=not misfits), misfits


def _plan_object(value: Any, saved: Mapping[str, Any]) -> tuple[Load | None, list[str]]:
    misfits = _of_groups(value, saved) if isinstance(value, torch.optim.Optimizer) else []
    return None if misfits else lambda: value.load_state_dict(cloned(saved)), misfits


def _plan_per_rank(value: Any, saved: Mapping[str, Any], rank: int) -> tuple[Load | None, list[str]]:
    states = saved.get(RANKS)
    if not isinstance(states, list) or not states:
        return None, ["no states of single ranks in the file"]
    if rank < len(states):
        return lambda: value.load_state_dict(cloned(states[rank])), []
    derive = getattr(value, "load_derived", None)
    if derive is None:
        return None, [f"{len(states)} ranks' states in the file, none for rank {rank}, and no load_derived()"]
    return lambda: derive(cloned(states), rank), []


def _of_groups(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> list[str]:
    groups = saved.get("param_groups", [])
    own = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in groups]
    if own != theirs:
        return [f"groups of {theirs} parameters instead of {own}"]
    # A version of torch may have added options to a class, so lacking some or having more of them is no sign; both is.
    known = {option for group in optimizer.param_groups for option in group} | _ADDED_TO_GROUPS
    strange = sorted({option for group in groups for option in group} - known)
    lacking = sorted(set(optimizer.defaults) - {option for group in groups for option in group})
    if strange and lacking:
        return [
            f"the state of another class of optimizer than {type(optimizer).__name__}, with {few(strange)} and without "
            f"{few(lacking)}"
        ]
    return []
