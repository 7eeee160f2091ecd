"""How each kind of object in a TorchState is saved, restored and shared (horovod/torch/elastic/state.py).

What has `state_dict` and `load_state_dict`, such as a scheduler or a GradScaler, stays the object it is on every rank,
and goes by these. (Horovod shares it by pickle, so that a scheduler on rank 1 drives a copy of the optimizer.)
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..checkpoint.contents.state import is_per_rank, is_stateful
from ..collectives.objects import broadcast_object
from ..samplers import DealingSampler
from ..training.parameters import broadcast_optimizer_state, broadcast_parameters
from ..world.numbers import rank
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
    """How one kind of object is saved, restored and shared; the base of those in the registry."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep a copy of the object's state in host memory. Local."""
        raise NotImplementedError

    def restore(self) -> None:
        """Give the object the state that was saved last. Local."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give the object rank 0's state. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt the object to a new world. Local."""

    def set_value(self, value: Any) -> None:
        """Look after another object from now on, and save it."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))


class ModelStateHandler(_StateDictHandler):
    """Parameters and buffers of a torch.nn.Module."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_StateDictHandler):
    """State and options of a torch.optim.Optimizer."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class _StatefulHandler(_StateDictHandler):
    """Whatever has a state_dict."""

    def sync(self) -> None:
        state = self.value.state_dict() if rank() == 0 else None
        self.value.load_state_dict(
            copy.deepcopy(broadcast_object(state))
        )  # the root gets back the very object


class SamplerStateHandler(_StatefulHandler):
    """Epoch and progress of an ElasticSampler or one of dualdist.samplers."""

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
    """Return the pairs (type, handler) that `TorchState` goes by; the first that fits is taken."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Make `TorchState` go by other pairs (type, handler) from now on."""
    global _registry
    _registry = registry


def handler_class(name: str, value: Any) -> type[StateHandler] | None:
    """Return what looks after things like `value`, None for plain ones. Raises TypeError for what cannot be shared."""
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler
    if is_per_rank(value):
        raise TypeError(
            f"`{name}` must be equal on all ranks, but is a {type(value).__name__} with a state for each rank instead. "
            "Leave it out: ranks come and go."
        )
    return _StatefulHandler if is_stateful(value) else None
