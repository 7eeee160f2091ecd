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

from ..checkpoint.contents.state import is_stateful
from ..collectives.objects import broadcast_object
from ..errors import HostsUpdatedInterrupt
from ..world.numbers import rank
from .handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    get_handler_registry,
    handler_class,
    set_handler_registry,
)

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
    "commits_made",
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
        self._commits_made = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Have `callbacks` called whenever the world was joined anew, such as one that scales the learning rate."""
        if callable(callbacks):
            raise TypeError("`callbacks` must be a list of functions, but is one function instead.")
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
        self._commits_made += 1
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


def attach(state: Any, commits: Commits) -> Commits | None:
    """Go on from the newest of `commits`, if there is one, and have `state.commit` write more of them. Collective.

    Returns those that it wrote until now. Raises TypeError when a value cannot be written, CheckpointError when a
    commit does not fit. Both on every rank.
    """
    if not isinstance(state, ObjectState):
        if rank() == 0:
            logger.warning(
                "A %s is not saved outside its processes: when torchrun starts them anew, training begins anew, too. "
                "Use an ObjectState or a TorchState.",
                type(state).__name__,
            )
        return None
    former = state._commits
    state._go_on(commits)
    return former


def detach(state: Any, former: Commits | None) -> None:
    """Have `state.commit` write what it wrote before `attach`. Local."""
    if isinstance(state, ObjectState):
        state._commits = former


def commits_made(state: Any) -> int | None:
    """Return how many commits `state` has made, None when its class does not say."""
    counts = isinstance(state, State) and type(state).commit is State.commit
    return state._commits_made if counts else None


class ObjectState(State):
    """Plain values, each an attribute. They are shared by pickle: objects that know of each other go into a TorchState.

    kwargs: the attributes and their values. Lists, dictionaries, sets, tuples, bytearrays and tensors are copied when
    they are saved and restored; any other value is kept as the object it is, so changes inside it are not undone.
    Raises ValueError for a name that State needs for itself.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._commits: Commits | None = None
        """Where `commit` also writes, when `run` finds that the launcher starts all processes anew."""
        _check_names(kwargs, vars(self))
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
        """Take over the newest of `commits`, and have `commit` write more of them. Collective."""
        objects = self._objects()
        commits.check(objects)
        if commits.resume(objects):
            self._set_attrs({name: value for name, value in objects.items() if not is_stateful(value)})
            self.save()
            self.on_reset()
        self._commits = commits

    def _save_attrs(self) -> None:
        self._saved_state = {name: _kept(getattr(self, name)) for name in self._saved_state}

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def _set_attrs(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def _check_names(names: Iterable[str], private: Iterable[str] = ()) -> None:
    for name in names:
        if hasattr(TorchState, name) or (name.startswith("_") and name in private):
            raise ValueError(f"A value must not be named {name!r}, which State has. Choose another name.")


def _kept(value: Any) -> Any:
    return copy.deepcopy(value) if isinstance(value, _CONTAINERS) else value


class TorchState(ObjectState):
    """Models, optimizers, samplers and plain values, each an attribute under its keyword.

    model, optimizer: any number of them; more can be given as kwargs. kwargs: what has a handler (modules, optimizers,
    samplers, see `set_handler_registry`) is saved and shared by that, what has `state_dict` and `load_state_dict`
    (schedulers, GradScaler) by these, all else as in ObjectState. Setting an attribute that has a handler to another
    object saves that. Raises ValueError as ObjectState does, TypeError for what has a state of its own on each rank.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        _check_names(values)
        kinds = {name: handler_class(name, value) for name, value in values.items()}
        self._handlers = {name: kind(values[name]) for name, kind in kinds.items() if kind is not None}
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
        if "_saved_state" in self.__dict__ and (name in self._handlers or name in self._saved_state):
            self._look_after(name, value)
        super().__setattr__(name, value)

    def _look_after(self, name: str, value: Any) -> None:
        """Have `value`, which is new under a known name, saved as its kind is."""
        kind, handler = handler_class(name, value), self._handlers.get(name)
        if kind is None:
            self._handlers.pop(name, None)
            self._saved_state.setdefault(name, _kept(value))
        elif type(handler) is kind:
            handler.set_value(value)
        else:
            self._saved_state.pop(name, None)
            self._handlers[name] = kind(value)
            self._handlers[name].save()
