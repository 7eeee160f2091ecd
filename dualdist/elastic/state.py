"""What a training process is: models, optimizers, samplers and plain values that can be saved, restored and shared.

The API of horovod/common/elastic.py and horovod/torch/elastic/state.py. Repaired are things that lose work or part
the ranks there: `sync` refreshes the saved copy; it shares the values of now, as it does the models of now, instead of
those of the last commit; a saved list, dictionary, set or tensor is a copy; restoring an optimizer does not tie its
saved copy to the live one; and a sampler deals anew when hosts have only gone, too.
"""

from __future__ import annotations

import copy
import logging
import queue
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..basics import rank
from ..errors import HostsUpdatedInterrupt
from ..objects import broadcast_object
from ..parameters import broadcast_optimizer_state, broadcast_parameters
from ..samplers import DealingSampler
from .sampler import ElasticSampler

if TYPE_CHECKING:
    from .commits import Commits

__all__ = (
    "HostsUpdatedInterrupt",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "State",
    "StateHandler",
    "TorchState",
    "attach",
    "detach",
    "get_handler_registry",
    "set_handler_registry",
)

logger = logging.getLogger("dualdist")

_REMOVED = 1
"""The change "hosts have only gone"; 2 is "added", 3 both (horovod/runner/elastic/worker.py, HostUpdateResult)."""
_CONTAINERS = (list, dict, set, tuple, bytearray, torch.Tensor)


class State:
    """What `elastic.run` works with. Subclasses say what saving, restoring and sharing mean.

    bcast_object: returns rank 0's object on every rank. get_rank: returns this process's rank.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits: Commits | None = None
        """Where `commit` also writes, when `run` finds that the launcher starts all processes anew."""

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Have `callbacks` called whenever the world was joined anew, such as one that scales the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Do what a new world asks for, before the state is shared."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note that the launcher has changed the hosts. timestamp: of the change, in seconds."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, and then `check_host_updates`. Collective.

        It copies the state to host memory, and under torchrun with restarts writes it to a file: commit as seldom as
        the work since the last commit may be lost.
        """
        self.save()
        self._persist()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on every rank when rank 0 was told that the hosts have changed. Collective."""
        before = latest = self._last_updated_timestamp
        change = 0
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > latest:
                latest, change = timestamp, change | int(update)
        before, self._last_updated_timestamp, change = self._bcast_object((before, latest, change))
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(change == _REMOVED)

    def _persist(self) -> None:
        """Write the state where it outlives the processes, if this job has use for that. Local."""

    def _go_on(self, commits: Commits) -> None:
        """Take over the newest of `commits`, and have `commit` write more of them. Collective."""
        if self._rank() == 0:
            logger.warning(
                "A %s is not saved outside its processes: when torchrun starts them anew, training begins anew, too. "
                "Use an ObjectState or a TorchState.", type(self).__name__,
            )  # fmt: skip

    def save(self) -> None:
        """Keep a copy of the state in host memory. Local."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the copy that was saved last. Local."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the state that of rank 0, and save it. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a new world, before `sync`. Local."""


def attach(state: State, commits: Commits) -> None:
    """Go on from the newest of `commits`, if there is one, and have `state.commit` write more of them. Collective.

    Raises TypeError when a value cannot be written, CheckpointError when a commit does not fit. Both on every rank.
    """
    state._go_on(commits)


def detach(state: State) -> None:
    """Have `state.commit` write nothing any more. Local."""
    state._commits = None


class ObjectState(State):
    """Plain values, each an attribute. They are shared by pickle.

    kwargs: the attributes and their values. Lists, dictionaries, sets, tuples, bytearrays and tensors are copied when
    they are saved and restored; any other value is kept as the object it is, so changes inside it are not undone.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._set_attrs(kwargs)
        self._saved_state = {name: _kept(value) for name, value in kwargs.items()}

    def save(self) -> None:
        self._save_attrs()

    def restore(self) -> None:
        self._set_attrs({name: _kept(value) for name, value in self._saved_state.items()})

    def sync(self) -> None:
        if self._saved_state:
            self._set_attrs(self._bcast_object({name: getattr(self, name) for name in self._saved_state}))
            self._save_attrs()

    def _persist(self) -> None:
        if self._commits is not None:
            self._commits.save(self._objects())

    def _objects(self) -> dict[str, Any]:
        """Return what a commit consists of: for each name the live object, or the value."""
        return {name: getattr(self, name) for name in self._saved_state}

    def _go_on(self, commits: Commits) -> None:
        objects = self._objects()
        commits.check(objects)
        if commits.resume(objects):
            self._set_attrs({name: objects[name] for name in self._saved_state})
            self.on_reset()
        self._commits = commits

    def _save_attrs(self) -> None:
        self._saved_state = {name: _kept(getattr(self, name)) for name in self._saved_state}

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def _set_attrs(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def _kept(value: Any) -> Any:
    return copy.deepcopy(value) if isinstance(value, _CONTAINERS) else value


class TorchState(ObjectState):
    """Models, optimizers, samplers and plain values, each an attribute under its keyword.

    model, optimizer: any number of them; more can be given as kwargs. kwargs: what has a handler (modules, optimizers,
    samplers, see `set_handler_registry`) is saved and shared by that, all else as in ObjectState.
    Setting an attribute that has a handler to another object saves that.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        handlers = {name: _handler(value) for name, value in values.items()}
        self._handlers = {name: handler for name, handler in handlers.items() if handler is not None}
        for name, handler in self._handlers.items():
            super().__setattr__(name, handler.value)
        plain = {name: value for name, value in values.items() if name not in self._handlers}
        super().__init__(broadcast_object, rank, **plain)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def _objects(self) -> dict[str, Any]:
        return super()._objects() | {name: handler.value for name, handler in self._handlers.items()}

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
            handler.save()
        super().sync()

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
        super().__setattr__(name, value)


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


class SamplerStateHandler(_StateDictHandler):
    """Epoch and progress of an ElasticSampler or one of dualdist.samplers."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))

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


def _handler(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)
