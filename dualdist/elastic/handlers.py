"""How each kind of object in a TorchState is saved, restored and shared (horovod/torch/elastic/state.py).

An object with `state_dict` and `load_state_dict`, such as a scheduler or a GradScaler, is shared by these methods, so
that it stays the same object on every rank. (Horovod pickles it: a scheduler on rank 1 then changes a copy of the
optimizer.)
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .. import accelerator, checks
from ..checkpoint.for_elastic import is_per_rank, is_stateful
from ..collectives.objects import broadcast_object
from ..collectives.on_all_ranks import unpickled_on_all_ranks
from ..samplers import DealingSampler
from ..training.optimizer_state import broadcast_optimizer_state, load_optimizer_state
from ..training.parameters import broadcast_parameters, is_extra_state
from ..world.ranks import rank
from .sampler import ElasticSampler

__all__ = (
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "get_handler_registry",
    "handler_class",
    "set_handler_registry",
)


class StateHandler:
    """Saves, restores and shares one kind of object. The base class of all handlers in the registry."""

    def __init__(self, value: Any) -> None:
        self.value = self._checked(value)

    def _checked(self, value: Any) -> Any:
        """Return `value` if this class can handle it, else raise TypeError."""
        return value

    def save(self) -> None:
        """Keep a copy of the object's state in host memory. Local."""
        raise NotImplementedError

    def restore(self) -> None:
        """Load the last saved state into the object. Local."""
        raise NotImplementedError

    def sync(self) -> None:
        """Load rank 0's state into the object. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt the object to a new world. Local."""

    def set_value(self, value: Any) -> None:
        """Handle another object from now on, and save it."""
        self.value = self._checked(value)
        self.save()


def _host_copy(state: Any) -> Any:
    """Return a deep copy of `state` whose tensors are in host memory."""
    # deepcopy takes what it finds under the ID of an object in its memo.
    on_devices = {id(leaf): leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)}
    memo = {
        key: leaf.detach().to("cpu", copy=True)
        for key, leaf in on_devices.items()
        if accelerator.has_streams(leaf)
    }
    return copy.deepcopy(state, memo)


class _StateDictHandler(StateHandler):
    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def _checked(self, value: Any) -> Any:
        methods = all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
        if methods and not isinstance(value, type):
            return value
        raise checks.wrong("value", "an object with state_dict and load_state_dict", value, error=TypeError)

    def save(self) -> None:
        self._saved = _host_copy(self.value.state_dict())

    def restore(self) -> None:
        self._load(copy.deepcopy(self._saved))

    def _load(self, state: Any) -> None:
        self.value.load_state_dict(state)


class ModelStateHandler(_StateDictHandler):
    """Parameters and buffers of a torch.nn.Module."""

    def sync(self) -> None:
        state = self.value.state_dict()
        broadcast_parameters(state, root_rank=0)
        extra = {name: value for name, value in state.items() if is_extra_state(name)}
        if extra:
            self.value.load_state_dict(extra, strict=False)


class OptimizerStateHandler(_StateDictHandler):
    """State and parameter groups of a torch.optim.Optimizer."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)

    def _load(self, state: Any) -> None:
        load_optimizer_state(self.value, state)


class _StatefulHandler(_StateDictHandler):
    """Any other object with `state_dict` and `load_state_dict`."""

    def sync(self) -> None:
        state = self.value.state_dict() if rank() == 0 else None
        received = unpickled_on_all_ranks(lambda: broadcast_object(state))
        # The root gets `state` itself back, not a copy.
        self.value.load_state_dict(copy.deepcopy(received))


class SamplerStateHandler(_StatefulHandler):
    """Epoch and progress of an ElasticSampler or a sampler of dualdist.samplers."""

    def reset(self) -> None:
        self.value.reset()


Registry = list[tuple[type, type[StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (DealingSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """Return the pairs (type, handler) that `TorchState` uses; the first matching pair wins."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Make `TorchState` use other pairs (type, handler) from now on. Both are classes."""
    global _registry
    rule = "a list of pairs (type, handler)"
    for pair in checks.items("registry", registry, rule):
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(part, type) for part in pair)):
            raise checks.wrong("registry", rule, registry, error=TypeError)
    _registry = registry


def handler_class(name: str, value: Any) -> type[StateHandler] | None:
    """Return the handler for `value`, None for a plain value. Raises TypeError for an object that differs by rank."""
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler
    if is_per_rank(value):
        raise TypeError(
            f"`{name}` must be equal on all ranks, but is a {type(value).__name__} with a state for each rank instead. "
            "Leave it out: the ranks of an elastic job change."
        )
    return _StatefulHandler if is_stateful(value) else None
