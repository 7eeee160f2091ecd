"""Which values a file may hold: plain values, plain containers and plain tensors, which any process can load."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ("check_containers", "check_portable", "to_portable")

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
_CONTAINERS = (list, tuple, set, dict, OrderedDict, Counter)

Place = Callable[[torch.Tensor, str], torch.Tensor]
"""Returns the tensor to save for a tensor of the live state. The text is the tensor's position in the state."""


def to_portable(value: Any, where: str, place: Place) -> Any:
    """Return `value` rebuilt from plain containers and values, each tensor replaced by what `place` returns for it.

    A tensor that occurs several times is replaced by one tensor. Raises TypeError, which quotes `where`, for anything
    that `torch.load(weights_only=True)` would refuse, and for a container that holds itself.
    """
    try:
        return _Conversion(place).convert(value, where)
    except RecursionError:
        raise _endless(where) from None


def check_portable(value: Any, where: str) -> None:
    """Raise TypeError as `to_portable` does, without copying a tensor."""
    to_portable(value, where, lambda tensor, where: tensor)


def check_containers(value: Any, where: str) -> None:
    """Raise TypeError, which quotes `where`, for a container in `value` that loading would return as another type."""
    try:
        _check_containers(value, where)
    except RecursionError:
        raise _endless(where) from None


def _endless(where: str) -> TypeError:
    return TypeError(
        f"`{where}` must not hold itself, but it does, or is nested too deeply. Leave the reference to itself out."
    )


def _check_containers(value: Any, where: str) -> None:
    if type(value) in _PLAIN:
        return
    if isinstance(value, list | tuple | set | frozenset | Mapping) and type(value) not in _CONTAINERS:
        raise TypeError(
            f"`{where}` must be a container that loads as the same type (list, tuple, set, dict, OrderedDict, "
            f"Counter), but is a {type(value).__name__} instead. Convert it."
        )
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_containers(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple | set):
        for place, item in enumerate(value):
            _check_containers(item, where if isinstance(value, set) else f"{where}[{place}]")


class _Conversion:
    """One conversion of a state. It remembers tensors, so that shared tensors stay shared."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._seen: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        """(memory, layout) -> (tensor in the state, the one to save). The first keeps its address from being reused."""

    def convert(self, value: Any, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value.detach(), where)
        if type(value) in _PLAIN:
            return value
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            items = [self.convert(item, f"{where}[{place}]") for place, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, set | frozenset):
            return {self.convert(item, where) for item in value}
        if isinstance(value, Mapping):
            return self._mapping(value, where)
        number = getattr(value, "item", None)
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and callable(number):
            return number()
        raise TypeError(
            f"`{where}` must be a tensor, a number, a string, or a list, tuple, set or dictionary of them, but is "
            f"a {type(value).__module__}.{type(value).__qualname__} instead. Convert it; of an object, save its "
            "state_dict()."
        )

    def _mapping(self, value: Mapping[Any, Any], where: str) -> Any:
        for key in value:
            if not isinstance(key, str | int | float | tuple | None):
                raise TypeError(
                    f"`{where}` must have plain keys, but has {key!r}, a {type(key).__name__}, instead."
                )
        items = {key: self.convert(item, f"{where}[{key!r}]") for key, item in value.items()}
        if isinstance(value, Counter):
            return Counter(items)
        if not hasattr(value, "_metadata"):
            return OrderedDict(items) if type(value) is OrderedDict else items
        # A module's state_dict has the versions of its submodules, which they need to load old states.
        versioned: Any = OrderedDict(items)
        versioned._metadata = self.convert(value._metadata, f"{where}._metadata")
        return versioned

    def _tensor(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.device.type == "meta":
            raise TypeError(
                f"`{where}` must be a plain tensor, but is a {type(tensor).__name__} on {tensor.device} instead."
            )
        if tensor.layout is not torch.strided:
            return self._place(tensor, where)
        key = (
            tensor.device,
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        if key not in self._seen:
            self._seen[key] = tensor, self._place(tensor, where)
        return self._seen[key][1]
