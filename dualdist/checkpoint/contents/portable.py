"""Values as they go into a file: plain containers, plain values, and tensors in host memory."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ("HostCopy", "check_containers", "check_portable", "cloned", "on_host")

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
_CONTAINERS = (list, tuple, set, dict, OrderedDict, Counter)
Place = Callable[[torch.Tensor, str], torch.Tensor]
"""Returns the tensor that stands for a tensor of the live state; the text says where in the state it is."""


def on_host(value: Any, where: str) -> Any:
    """Return `value` with its tensors in host memory: those that are there already are shared, not copied.

    Raises TypeError, which quotes `where`, for anything that `torch.load(weights_only=True)` would refuse.
    """
    return _Walk(_compact).portable(value, where)


def check_containers(value: Any, where: str) -> None:
    """Raise TypeError, which quotes `where`, for a container in `value` that would come back as one of another type."""
    if type(value) in _PLAIN:
        return
    if isinstance(value, list | tuple | set | frozenset | Mapping) and type(value) not in _CONTAINERS:
        raise TypeError(
            f"`{where}` must be a container that comes back as it was (list, tuple, set, dict, OrderedDict, Counter), "
            f"but is a {type(value).__name__} instead. Convert it."
        )
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_containers(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple | set):
        for place, item in enumerate(value):
            check_containers(item, where if isinstance(value, set) else f"{where}[{place}]")


def check_portable(value: Any, where: str) -> None:
    """Raise TypeError as `on_host` does, without moving a tensor."""
    _Walk(lambda tensor, where: tensor).portable(value, where)


def cloned(value: Any) -> Any:
    """Return a copy in host memory, tensors included: of what was loaded, one that does not keep the file there."""
    return _Walk(lambda tensor, where: tensor.to("cpu", copy=True)).portable(value, "state")


class HostCopy:
    """A copy of a state in host memory. The next one uses its tensors again: fresh pages cost more than copying.

    At most one copy is held. The last one must not be in use when the next is taken.
    """

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def take(self, value: Any, where: str) -> Any:
        """Return `value` as `on_host` does, but with every tensor copied."""
        held, self._held = self._held, {}

        def place(tensor: torch.Tensor, where: str) -> torch.Tensor:
            copy = held.pop(where, None)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = torch.empty_like(
                    tensor, device="cpu", requires_grad=False, pin_memory=tensor.device.type == "cuda"
                )
            copy.copy_(tensor, non_blocking=True)
            self._held[where] = copy
            return copy

        copied = _Walk(place).portable(value, where)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return copied


class _Walk:
    """One walk over a state: what was the same tensor stays the same tensor."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._seen: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def portable(self, value: Any, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value.detach(), where)
        if type(value) in _PLAIN:
            return value
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            items = [self.portable(item, f"{where}[{place}]") for place, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, set | frozenset):
            return {self.portable(item, where) for item in value}
        if isinstance(value, Mapping):
            return self._mapping(value, where)
        number = getattr(value, "item", None)
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and callable(number):
            return number()
        raise TypeError(
            f"`{where}` must be a tensor, a number, a string, or a list, tuple, set or dictionary of them, but is "
            f"a {type(value).__module__}.{type(value).__qualname__} instead. Convert it, an object in its state_dict()."
        )

    def _mapping(self, value: Mapping[Any, Any], where: str) -> Any:
        for key in value:
            if not isinstance(key, str | int | float | tuple | None):
                raise TypeError(
                    f"`{where}` must have plain keys, but has {key!r}, a {type(key).__name__}, instead."
                )
        items = {key: self.portable(item, f"{where}[{key!r}]") for key, item in value.items()}
        if isinstance(value, Counter):
            return Counter(items)
        if not hasattr(value, "_metadata"):
            return OrderedDict(items) if type(value) is OrderedDict else items
        versioned: Any = OrderedDict(items)  # the versions of a module's parts, by which old states are read
        versioned._metadata = self.portable(value._metadata, f"{where}._metadata")
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
            self._seen[key] = (
                tensor,
                self._place(tensor, where),
            )  # the first keeps its address from being used anew
        return self._seen[key][1]


def _compact(tensor: torch.Tensor, where: str) -> torch.Tensor:
    host = tensor.cpu()
    if host.layout is torch.strided and host.untyped_storage().nbytes() > host.numel() * host.element_size():
        return host.clone()  # torch.save would write all of which this is a part
    return host
