"""From live objects to the values of a checkpoint; save_and_load.py goes the other way.

Data-parallel ranks hold equal objects, so the writer's are saved. States that differ, and those of an object with
`per_rank = True`, are saved from every rank. With `per_rank = False` the writer's is saved without a comparison. Values
that are floats alone are, too: a rank's own loss must not bind a file to a number of ranks. An object with
`collective_state = True` has a collective `state_dict`, which every rank calls.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from ..core import accelerator, needed
from ..core.checks import is_dtensor
from ..core.collectives.objects import compact
from ..core.training.parallel import SynchronizedModule

# Names of a module's tensors, with or without wrappers, and which saved tensors a module can load.

_WRAPPER_ATTRIBUTES = {"module", "_orig_mod"}
"""The attributes in which torch's DDP and DataParallel, AveragedModel and torch.compile hold the wrapped module."""
_SHOWN = 3


def without_wrappers(name: str) -> str:
    """Return `name` without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_ATTRIBUTES)


def bare_names(
    module: torch.nn.Module, state: Mapping[str, Any], attribute_of: Callable[[torch.nn.Module], str]
) -> Mapping[str, Any]:
    """Return `state`, the state dict of `module`, with the names of the model without its wrappers.

    attribute_of: in which attribute a part of `module` holds what it wraps; "" if it wraps nothing.
    """
    found = [(name, attribute_of(part)) for name, part in module.named_modules(remove_duplicate=False)]
    hidden = {f"{name}.{attribute}".lstrip(".") for name, attribute in found if attribute}  # such as "0.module"

    def bare(name: str) -> str:
        parts = name.split(".")
        return ".".join(part for place, part in enumerate(parts, 1) if ".".join(parts[:place]) not in hidden)

    made: Any = OrderedDict((bare(name), value) for name, value in state.items())
    if hasattr(state, "_metadata"):
        made._metadata = OrderedDict((bare(name), value) for name, value in state._metadata.items())
    return made  # type: ignore[no-any-return]


def fitting_part(own: Mapping[str, Any], saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the part of `saved` that a module with the state `own` can load, under its names, and what does not match.

    If the names differ, they are compared without the parts that wrappers add, unless that makes two of them equal.
    """
    given = dict(saved)
    if own.keys() != saved.keys():
        mine, theirs = ({without_wrappers(name): name for name in names} for names in (own, saved))
        if len(mine) == len(own) and len(theirs) == len(saved):
            given = {mine.get(name, theirs[name]): saved[theirs[name]] for name in theirs}
    missing = [name for name in own if name not in given]
    unexpected = [name for name in given if name not in own]
    both = {name: (value, own[name]) for name, value in given.items() if name in own}
    shapes = {
        name: f"{name}: {tuple(value.shape)} instead of {tuple(mine.shape)}"
        for name, (value, mine) in both.items()
        if isinstance(value, torch.Tensor) and isinstance(mine, torch.Tensor)
        if not torch.nn.parameter.is_lazy(mine) and value.shape != mine.shape
    }
    fitting = {name: value for name, (value, _) in both.items() if name not in shapes}
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", [*shapes.values()]))
    return fitting, [f"{len(found)} {kind} ({few(found)})" for kind, found in kinds if found]


def few(names: Sequence[str]) -> str:
    """Return the first three names as text, and how many more there are."""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# Which values a file may hold: plain values, plain containers and plain tensors, which any process can load.

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
_CONTAINERS = (list, tuple, set, dict, OrderedDict, Counter)

TensorCopier = Callable[[torch.Tensor, str], torch.Tensor]
"""Returns the tensor to save for a tensor of the live state. The text is the tensor's position in the state."""


@contextlib.contextmanager
def _without_cycles(where: str) -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise TypeError(
            f"`{where}` must not hold itself, but it does, or is nested too deeply. Leave the reference to itself out."
        ) from None


def to_portable(value: Any, where: str, copier: TensorCopier) -> Any:
    """Return `value` rebuilt from plain containers and values, each tensor replaced by what `copier` returns for it.

    A tensor that occurs several times is replaced by one tensor. Raises TypeError, which quotes `where`, for anything
    that `torch.load(weights_only=True)` would refuse, and for a container that holds itself.
    """
    seen: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
    """(memory, layout) -> (tensor in the state, the one to save). The first keeps its address from being reused."""

    def copied(tensor: torch.Tensor, where: str) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.device.type == "meta":
            fix = " Use CheckpointManager(sharded=True)." if is_dtensor(tensor) else ""
            raise TypeError(
                f"`{where}` must be a plain tensor, but is a {type(tensor).__name__} on {tensor.device} instead.{fix}"
            )
        if tensor.layout is not torch.strided:
            return copier(tensor, where)
        memory = tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        key = (*memory, tensor.shape, tensor.stride(), tensor.dtype)
        if key not in seen:
            seen[key] = tensor, copier(tensor, where)
        return seen[key][1]

    with _without_cycles(where):
        return _converted(value, where, copied)


def _converted(value: Any, where: str, copied: TensorCopier) -> Any:
    if isinstance(value, torch.Tensor):
        return copied(value.detach(), where)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        items = [_converted(item, f"{where}[{place}]", copied) for place, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, set | frozenset):
        return {_converted(item, where, copied) for item in value}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int | float | tuple | None):
                raise TypeError(f"`{where}` must have plain keys, but has {key!r}, a {type(key).__name__}, instead.")
        found = {key: _converted(item, f"{where}[{key!r}]", copied) for key, item in value.items()}
        if isinstance(value, Counter):
            return Counter(found)
        if not hasattr(value, "_metadata"):
            return OrderedDict(found) if type(value) is OrderedDict else found
        # A module's state_dict has the versions of its submodules, which they need to load old states.
        versioned: Any = OrderedDict(found)
        versioned._metadata = _converted(value._metadata, f"{where}._metadata", copied)
        return versioned
    number = getattr(value, "item", None)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and callable(number):
        return number()
    raise TypeError(
        f"`{where}` must be a tensor, a number, a string, or a list, tuple, set or dictionary of them, but is "
        f"a {type(value).__module__}.{type(value).__qualname__} instead. Convert it; of an object, save its "
        "state_dict()."
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


# The copy of a state to host memory, from which a checkpoint is written.


def on_host(value: Any, where: str) -> Any:
    """Return `value` in portable form, with its tensors in host memory. Tensors already there are shared, not copied.

    Raises TypeError, which quotes `where`, for anything that `torch.load(weights_only=True)` would refuse.
    """
    return to_portable(value, where, lambda tensor, where: compact(tensor.cpu()))


def cloned(value: Any) -> Any:
    """Return a copy of `value` in host memory, tensors included. A copy of loaded values does not keep their file."""
    return to_portable(value, "state", lambda tensor, where: tensor.to("cpu", copy=True))


_ALIGNMENT = 64
"""In bytes, of the copies of tensors in host memory."""
_LARGEST_CHUNK = 1 << 30


class HostCopy:
    """A copy of a state in host memory. The next copy reuses its tensors, since new pages cost more than copying.

    It holds at most one copy. The last copy must not be in use when the next is taken.
    """

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}
        self._chunk = torch.UntypedStorage(0, device="cpu")
        """Where the next copies from a device lie: a part of it each, since a piece of pinned memory is rounded up."""
        self._used = 0

    def _memory_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return host memory for a copy of `tensor`, with a storage of its own, as torch.save writes whole ones."""
        if tensor.layout is not torch.strided or not accelerator.has_streams(tensor):
            return torch.empty_like(tensor, device="cpu")
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + tensor.nbytes > self._chunk.nbytes():
            held = sum(copy.nbytes for copy in self._held.values())  # so that a small state takes little
            size = 1 << max(tensor.nbytes - 1, min(held, _LARGEST_CHUNK - 1)).bit_length()
            self._chunk = needed("streams").host_memory(size, torch.uint8, tensor.device).untyped_storage()
            start = 0
        self._used = start + tensor.nbytes
        strides = torch.empty_like(tensor, device="meta").stride()
        memory = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return memory.set_(self._chunk[start : self._used], 0, tensor.shape, strides)

    def take(self, value: Any, where: str) -> Any:
        """Return `value` as `on_host` does, but with every tensor copied."""
        held, self._held = self._held, {}
        sources: list[torch.Tensor] = []

        def copied(tensor: torch.Tensor, where: str) -> torch.Tensor:
            copy = held.pop(where, None)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = self._memory_for(tensor)
            copy.copy_(tensor, non_blocking=True)
            sources.append(tensor)
            self._held[where] = copy
            return copy

        copy = to_portable(value, where, copied)
        for device in {tensor.device for tensor in sources}:
            accelerator.synchronize(device)
        return copy


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


def is_collective(value: Any) -> bool:
    """Return whether all ranks must call the `state_dict` of `value`."""
    return is_stateful(value) and getattr(value, "collective_state", False) is True


def rank_states(saved: Any) -> list[Any] | None:
    """Return the states of all ranks in what a file has under one name; None if it has one for all ranks."""
    is_of_ranks = isinstance(saved, Mapping) and list(saved) == [RANKS] and isinstance(saved[RANKS], list)
    return saved[RANKS] if is_of_ranks else None


def state_of(value: Any) -> Any:
    """Return what is saved of `value`: a plain value itself, or its `state_dict()`.

    That of a module has the names of the bare model, without those of wrappers.
    """
    state = value.state_dict() if is_stateful(value) else value
    if not isinstance(value, torch.nn.Module):
        return state
    return bare_names(value, state, lambda part: "module" if isinstance(part, SynchronizedModule) else "")


def check_state(state: Any) -> list[str]:
    """Return the names in `state`, sorted. Raise TypeError if it cannot be saved and restored."""
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise TypeError(f"`state` must be a dictionary from names to objects and values, but is {state!r} instead.")
    plain = {name: value for name, value in state.items() if not is_stateful(value)}
    for name, value in plain.items():
        with _without_cycles(f"state[{name!r}]"):
            _check_containers(value, f"state[{name!r}]")
        if rank_states(value) is not None:
            raise ValueError(
                f"`state[{name!r}]` must not be a list under the key {RANKS!r} alone, but is. Use another key."
            )
    if plain and not isinstance(state, MutableMapping):
        raise TypeError(
            f"`state` must be a dictionary that can be changed, since restoring sets {few(list(plain))} in it, but is "
            f"a {type(state).__name__} instead."
        )
    return sorted(state)


def collect_own(state: Mapping[str, Any], *, writes: bool) -> dict[str, Any]:
    """Return the states of objects that every rank takes, and this rank sends. Collective if a `state_dict` is.

    writes: whether this rank is the writer. Only the writer keeps states that are equal on all ranks.
    """
    own: dict[str, Any] = {}
    for name, value in sorted(state.items()):  # so that all ranks make the same calls
        if is_per_rank(value) or (writes and is_collective(value)):
            own[name] = value.state_dict()
        elif is_collective(value):
            value.state_dict()  # the writer's needs it; its memory is free before the next one
    return own


def collect_compared(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states and plain values that are the same on all ranks only if the script keeps them so.

    It does so for models and optimizers, whose gradients are averaged.
    """
    return {
        name: state_of(value)
        for name, value in sorted(state.items())
        if not isinstance(value, torch.nn.Module | torch.optim.Optimizer)
        if not isinstance(getattr(value, RANKS, None), bool) and not is_collective(value)
        if is_stateful(value) or not _has_only_floats(value)
    }


def _has_only_floats(value: Any) -> bool:
    """Return whether `value` is a float, or has no other values, as losses, times and lists of them."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.is_floating_point()
    if isinstance(value, Mapping | list | tuple | set):
        items = value.values() if isinstance(value, Mapping) else value
        return bool(items) and all(map(_has_only_floats, items))
    return isinstance(value, float | np.floating)


def digest(value: Any, where: str) -> str:
    """Return the same text for equal values, wherever their tensors are. Raises TypeError as `on_host`."""
    with _without_cycles(where):
        text = _described(to_portable(value, where, lambda tensor, where: tensor))
    return hashlib.blake2b(text.encode()).hexdigest()


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        kind = f"{value.dtype} {tuple(value.shape)}"
        if value.layout is not torch.strided:
            value = value.to_sparse_coo().coalesce()
            return f"sparse {kind} {_described([value.indices(), value.values()])}"
        data = value.int_repr() if value.is_quantized else value
        bits = data.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        # A copy, because numpy() keeps the memory of a tensor from being resized.
        return f"{kind} {hashlib.blake2b(bits.clone().numpy().data).hexdigest()}"
    if not isinstance(value, Mapping | list | tuple | set):
        return repr(value)
    items = list(map(_described, value.items() if isinstance(value, Mapping) else value))
    is_ordered = isinstance(value, list | tuple | OrderedDict)
    return f"{type(value).__name__}({items if is_ordered else sorted(items)})"


def collect(
    state: Mapping[str, Any], own: Sequence[Mapping[str, Any]], differing: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the values to save, before `to_portable` converts them.

    own: each rank's `collect_own`, and its states of the names `differing`.
    """

    def saved(name: str, value: Any) -> Any:
        if is_per_rank(value) or name in differing:
            return {RANKS: [states[name] for states in own]}
        return own[0][name] if own and name in own[0] else state_of(value)

    return {name: saved(name, value) for name, value in state.items()}
