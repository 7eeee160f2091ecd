"""The names in the state dict of a wrapped module.

In memory they are torch's: "module.0.weight", as in the module tree, so that torch.distributed.checkpoint and
torch.func.functional_call understand them. In files they are those of the bare model, so that a checkpoint of one
style loads into the other.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

PREFIX = "module."


class WrappedState(OrderedDict[str, Any]):
    """The state dict of a wrapped module. Names without "module." are found, too, and are those that pickle writes."""

    _metadata: Mapping[str, Any]
    _wrapped_names: frozenset[str] = frozenset()
    """The names from the wrapper; not those under which others have entered values."""

    def __missing__(self, name: str) -> Any:
        if isinstance(name, str) and super().__contains__(PREFIX + name):
            return self[PREFIX + name]
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and super().__contains__(PREFIX + name))

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def copy(self) -> WrappedState:
        made = WrappedState(self)
        made.__dict__.update(self.__dict__)
        return made

    __copy__ = copy  # otherwise copy.copy would use `__reduce__`, whose names lack "module."

    def __or__(self, other: Any) -> Any:
        made = self.copy()
        made.update(other)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> WrappedState:
        made = WrappedState((name, copy.deepcopy(value, memo)) for name, value in self.items())
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce__(self) -> Any:
        """Pickle as an OrderedDict with the names of the bare model."""
        made: Any = OrderedDict(
            (name.removeprefix(PREFIX) if name in self._wrapped_names else name, value) for name, value in self.items()
        )
        if hasattr(self, "_metadata"):
            # The wrapper's own name is "", that of the model "module".
            known = self._metadata.items()
            made._metadata = OrderedDict((name.removeprefix("module").lstrip("."), value) for name, value in known)
        return made.__reduce__()


def with_prefix(module: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Rename the entries of `state` for the wrapper at `prefix`, in place: "module." is added where it is missing.

    module: the model in the wrapper, which may have a part of its own that is called "module".
    """
    own = set(module.state_dict())
    for key in [key for key in state if key.startswith(prefix)]:
        name = key[len(prefix) :]
        if name in own or not name.startswith(PREFIX):
            state[prefix + PREFIX + name] = state.pop(key)
