"""From live objects to the values of a checkpoint; restoration.py goes the other way.

Data-parallel ranks hold equal objects, so the writer's are saved. An object with `per_rank = True` is saved from every
rank.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch

from ...training.parallel import DistributedDataParallel
from ...training.state_names import bare_names
from .portable import check_containers
from .tensor_names import few

__all__ = ("RANKS", "check_state", "collect", "collect_own", "is_per_rank", "is_stateful", "state_of")

RANKS = "per_rank"
"""The key under which a file holds the states of all ranks, in rank order."""


def is_stateful(value: Any) -> bool:
    """Return whether `value` is saved by its `state_dict`."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


def is_per_rank(value: Any) -> bool:
    """Return whether every rank's state of `value` is saved."""
    return is_stateful(value) and getattr(value, "per_rank", False) is True


def state_of(value: Any) -> Any:
    """Return `value.state_dict()`; for a module with the names of the bare model, without those of wrappers."""
    state = value.state_dict()
    return bare_names(value, state, DistributedDataParallel) if isinstance(value, torch.nn.Module) else state


def check_state(state: Any) -> list[str]:
    """Return the names in `state`, sorted. Raise TypeError if it cannot be saved and restored."""
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise TypeError(
            f"`state` must be a dictionary from names to objects and values, but is {state!r} instead."
        )
    for name, value in state.items():
        _check_plain(name, value)
    plain = [name for name, value in state.items() if not is_stateful(value)]
    if plain and not isinstance(state, MutableMapping):
        raise TypeError(
            f"`state` must be a dictionary that can be changed, since restoring sets {few(plain)} in it, but is a "
            f"{type(state).__name__} instead."
        )
    return sorted(state)


def collect_own(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states that this rank must send to the writer."""
    return {name: value.state_dict() for name, value in state.items() if is_per_rank(value)}


def collect(state: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values to save, before their conversion (see portable.py). own: each rank's `collect_own`."""
    values = {}
    for name, value in state.items():
        if is_per_rank(value):
            values[name] = {RANKS: [states[name] for states in own]}
        else:
            _check_plain(name, value)
            values[name] = state_of(value) if is_stateful(value) else value
    return values


def _check_plain(name: str, value: Any) -> None:
    if not is_stateful(value):
        check_containers(value, f"state[{name!r}]")
