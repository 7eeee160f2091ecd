"""The state of a communication hook in checkpoints."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = ("CommHookState",)

_PLAIN = (bool, int, float, str, bytes, type(None), torch.Tensor)
_PYTHON, _NUMPY = "random.Random", "numpy.random.RandomState"


class CommHookState:
    """Saves and loads the state of a communication hook, such as torch's PowerSGDState.

    Every rank's state is saved, because ranks remember different errors. In a larger world, a rank without a saved
    state gets that of another rank. Attributes are saved if they are numbers, strings, tensors, containers of these or
    random number generators. Others, such as process groups, are left as they are.
    """

    per_rank = True

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes, in values that `torch.load(weights_only=True)` accepts."""
        names = getattr(type(self._state), "__slots__", None) or vars(self._state)
        values = {name: getattr(self._state, name) for name in names if hasattr(self._state, name)}
        return {name: _encoded(value) for name, value in values.items() if _is_saved(value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the attributes."""
        for name, value in state.items():
            setattr(self._state, name, _decoded(value))

    def load_derived(self, states: Sequence[dict[str, Any]], rank: int) -> None:
        """Set the attributes of a rank that has no state in `states`."""
        self.load_state_dict(states[rank % len(states)])


def _is_saved(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_saved, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_saved, value))
    return isinstance(value, (*_PLAIN, random.Random, np.random.RandomState))


def _encoded(value: Any) -> Any:
    if isinstance(value, random.Random):
        return {_PYTHON: value.getstate()}
    if isinstance(value, np.random.RandomState):
        kind, keys, *rest = value.get_state(legacy=True)
        return {_NUMPY: (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest)}
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {_PYTHON}:
        python = random.Random()
        python.setstate(value[_PYTHON])
        return python
    if isinstance(value, dict) and value.keys() == {_NUMPY}:
        kind, keys, *rest = value[_NUMPY]
        generator = np.random.RandomState()
        generator.set_state((kind, keys.numpy().astype(np.uint32), *rest))
        return generator
    return value
