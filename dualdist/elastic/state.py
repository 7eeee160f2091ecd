"""The state of an elastic training: models, optimizers, samplers and plain values, saved, restored and shared.

The API of horovod/common/elastic.py and horovod/torch/elastic/state.py. Fixes Horovod behaviour that loses work or
desynchronises ranks:
- `sync` refreshes the saved copy, and shares the current plain values, not those of the last commit. (Horovod does so
  for models only.)
- A saved list, dictionary, set or tensor is a copy.
- After restoring an optimizer, its saved copy is independent of the live state.
- A sampler partitions its samples again also when hosts were only removed.
"""

from __future__ import annotations

import copy
import queue
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..checkpoint.for_elastic import Commits, is_collective, is_per_rank, is_stateful
from ..core import accelerator, checks
from ..core.checks import flag, instance, integer, mapping
from ..core.collectives.objects import BROADCAST_OBJECT, broadcast_object, if_all_succeed
from ..core.lifecycle import rank
from ..core.training.optimizer_state import broadcast_optimizer_state, load_optimizer_state
from ..core.training.parameters import broadcast_parameters, is_extra_state
from ..core.world import reporting
from ..errors import HostsUpdatedInterrupt, logger
from ..samplers import DealingSampler, checked_epoch

# The samples of each rank when the number of ranks may change in the middle of an epoch.


class ElasticSampler(DealingSampler[int]):
    """Partitions the samples that this epoch has not processed yet evenly over the ranks.

    The same samples as from horovod/torch/elastic/sampler.py: all ranks shuffle the indices in the same way, remove the
    processed ones from the front, and pad the rest with its own first indices. Give the sampler to `TorchState`, call
    `record_batch` after each batch, and `set_epoch` at the end of each epoch.

    dataset: its length must be equal on all ranks and must not change. seed: must be equal on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = cast("Sized", instance("dataset", dataset, Sized, "a dataset with a length"))
        self.shuffle = flag("shuffle", shuffle)
        self._warned = False
        self._configure(None, None, seed, drop_last=False, pad=True)

    def _sequence(self) -> Sequence[int]:
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        return indices

    def _start_at(self, offset: int) -> None:
        super()._start_at(min(offset, len(self.dataset)))
        self.remaining_indices = self._sequence()[self._offset :]

    def __iter__(self) -> Iterator[int]:
        left, shard = self.remaining_indices, range(self.rank, self.total_size, self.num_replicas)
        self.indices = [left[index % len(left)] for index in shard]
        return self._draw(self.indices, range(len(self.indices)))

    @property
    def processed_num(self) -> int:
        """How many samples of this epoch all ranks together have processed, the repeated ones included."""
        return self._offset + self._consumed * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` with all samples. Call it at the end of the previous epoch, not after resuming an epoch."""
        self.epoch = checked_epoch(epoch)
        self._start_at(0)

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch of `batch_size` samples."""
        integer("batch_idx", batch_idx, least=0)
        batch_size = integer("batch_size", batch_size, least=0)
        if self.processed_num >= len(self.dataset) and self.rank == 0 and not self._warned:
            self._warned = True
            logger.warning(
                "ElasticSampler: all %d samples of epoch %d were processed before this batch. Call set_epoch() at the "
                "end of each epoch. Otherwise no samples are left after a reset.",
                len(self.dataset),
                self.epoch,
            )
        self._consumed += batch_size

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, partitioned over the current ranks."""
        fix = "Pass what state_dict() of an ElasticSampler has returned."
        mapping("state_dict", state_dict, "epoch", "processed_num", fix=fix)
        epoch = checked_epoch(state_dict["epoch"], "state_dict['epoch']")
        processed = integer("state_dict['processed_num']", state_dict["processed_num"], least=0)
        self.epoch = epoch
        self._start_at(processed)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and the number of samples that all ranks together have processed in it."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}


# How each kind of object in a TorchState is saved, restored and shared (horovod/torch/elastic/state.py).
#
# An object with `state_dict` and `load_state_dict`, such as a scheduler, is shared by these methods, so that it stays
# the same object on every rank. (Horovod pickles it: a scheduler on rank 1 then changes a copy of the optimizer.)


class _Restorable:
    """A state, or the handler of an object in one: the methods that each must have."""

    def save(self) -> None:
        """Keep a copy of the state in host memory. Local, unless the `state_dict` of an object is collective."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the copy that was saved last. Local."""
        raise NotImplementedError

    def sync(self) -> None:
        """Replace the state by that of rank 0. A State also saves it. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a new world, before `sync`. Local."""


class StateHandler(_Restorable):
    """Saves, restores and shares one kind of object. The base class of all handlers in the registry."""

    def __init__(self, value: Any) -> None:
        self.value = self._checked(value)

    def _checked(self, value: Any) -> Any:
        """Return `value` if this class can handle it, else raise TypeError."""
        return value

    def set_value(self, value: Any) -> None:
        """Handle another object from now on, and save it."""
        self.value = self._checked(value)
        self.save()


def _copied_to_host(state: Any) -> Any:
    """Return a deep copy of `state` whose tensors are in host memory."""
    # deepcopy takes what it finds under the ID of an object in its memo.
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor) and accelerator.has_streams(leaf)]
    return copy.deepcopy(state, {id(tensor): tensor.detach().to("cpu", copy=True) for tensor in tensors})


class _StatefulHandler(StateHandler):
    """Any object with `state_dict` and `load_state_dict`."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def _checked(self, value: Any) -> Any:
        if is_stateful(value):
            return value
        raise checks.wrong("value", "an object with state_dict and load_state_dict", value, error=TypeError)

    def save(self) -> None:
        self._saved = _copied_to_host(self.value.state_dict())

    def restore(self) -> None:
        self._load(copy.deepcopy(self._saved))

    def _load(self, state: Any) -> None:
        self.value.load_state_dict(state)

    def sync(self) -> None:
        # The root gets its state itself back, not a copy.
        self.value.load_state_dict(copy.deepcopy(if_all_succeed(self._receive, RuntimeError)))

    def _receive(self) -> Any:
        with reporting(BROADCAST_OBJECT):  # the object's own code may fail
            state = self.value.state_dict() if rank() == 0 else None
        return broadcast_object(state)


class ModelStateHandler(_StatefulHandler):
    """Parameters and buffers of a torch.nn.Module."""

    def sync(self) -> None:
        state = self.value.state_dict()
        broadcast_parameters(state, root_rank=0)
        if extra := {name: value for name, value in state.items() if is_extra_state(name)}:
            self.value.load_state_dict(extra, strict=False)


class OptimizerStateHandler(_StatefulHandler):
    """State and parameter groups of a torch.optim.Optimizer."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)

    def _load(self, state: Any) -> None:
        load_optimizer_state(self.value, state)


class _CollectiveHandler(_StatefulHandler):
    """An object whose `state_dict` all ranks call, such as a metric: its state is that of all ranks together."""

    def __init__(self, value: Any) -> None:
        # Not saved before the first `sync`: under horovodrun, a new rank is alone when it makes its TorchState.
        StateHandler.__init__(self, value)
        self._saved: Any = None

    def restore(self) -> None:
        if self._saved is not None:
            super().restore()

    def reset(self) -> None:
        # Every rank of the last world had a part of the state, and some of these ranks may have left.
        self.restore()

    def _receive(self) -> Any:
        return broadcast_object(self.value.state_dict())


class SamplerStateHandler(_StatefulHandler):
    """Epoch and progress of an ElasticSampler or a sampler of dualdist.samplers."""

    def reset(self) -> None:
        self.value.reset()


Registry = list[tuple[type, type[StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (DealingSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """Return the pairs (type, handler) that `TorchState` uses; the first matching pair wins. Local."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Make `TorchState` use other pairs (type, handler) from now on. Both are classes. Local."""
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
    if is_collective(value):
        return _CollectiveHandler
    return _StatefulHandler if is_stateful(value) else None


_REMOVED = 1
"""The change "hosts were only removed"; 2 is "added", 3 both (horovod/runner/elastic/worker.py, HostUpdateResult)."""
_CONTAINERS = (list, dict, set, tuple, bytearray, torch.Tensor)


class State(_Restorable):
    """The state that `elastic.run` works with. Subclasses define how to save, restore and share it.

    bcast_object: returns rank 0's object on every rank. get_rank: returns this process's rank.
    """

    _commits: Commits | None = None
    """The files that `commit` also writes, when the launcher restarts all processes."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = checks.function("bcast_object", bcast_object)
        self._rank = checks.function("get_rank", get_rank)
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits_made = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Call `callbacks` each time the world has been joined again, for example to scale the learning rate."""
        rule = "a list of functions"
        functions = checks.items("callbacks", callbacks, rule)
        if not all(map(callable, functions)):
            raise checks.wrong("callbacks", rule, callbacks, error=TypeError)
        self._reset_callbacks.extend(functions)

    def on_reset(self) -> None:
        """Adapt to a new world and call the reset callbacks, before the state is shared."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Record that the launcher has changed the hosts.

        timestamp: of the change, in seconds. update_res: 1 when hosts were removed, 2 when added, 3 for both.
        """
        seconds = checks.number("timestamp", timestamp)
        self._host_messages.put((seconds, checks.integer("update_res", update_res, 0, 4)))

    def commit(self) -> None:
        """Save the state, then call `check_host_updates`. Collective.

        It copies the state to host memory, and under torchrun with restarts writes it to a file. A failure loses the
        work since the last commit, so commit as rarely as that loss allows.
        """
        self.save()
        if self._commits is not None:
            self._commits.save(self._objects())
        self._commits_made += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Save the state and raise HostsUpdatedInterrupt on every rank, if rank 0 has recorded a change of hosts.

        Collective.
        """
        before = latest = self._last_updated_timestamp
        change = 0
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > latest:
                latest, change = timestamp, change | int(update)
        before, self._last_updated_timestamp, change = self._bcast_object((before, latest, change))
        if self._last_updated_timestamp > before:
            self.save()  # while all ranks are there: see _CollectiveHandler
            raise HostsUpdatedInterrupt(change == _REMOVED)

    def _objects(self) -> dict[str, Any]:
        """Return the content of a commit: for each name the live object or the value."""
        return {}


def commits_made(state: Any) -> int | None:
    """Return how many commits `state` has made, None when its class overrides `commit`."""
    counts = isinstance(state, State) and type(state).commit is State.commit
    return state._commits_made if counts else None


class ObjectState(State):
    """Plain values, each an attribute. They are shared by pickle; objects that refer to each other need a TorchState.

    kwargs: the attributes and their values. Lists, dictionaries, sets, tuples, bytearrays and tensors are copied when
    they are saved and restored. Of any other value only the reference is kept, so `restore` does not undo changes
    inside it. Raises ValueError for a name that State itself has.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        _check_names(kwargs, vars(self))
        self._set_attrs(kwargs)
        self._saved_state = dict(kwargs)
        ObjectState.save(self)

    def save(self) -> None:
        self._saved_state = {name: _copy_containers(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attrs({name: _copy_containers(value) for name, value in self._saved_state.items()})

    def sync(self) -> None:
        if self._saved_state:
            values = {name: getattr(self, name) for name in self._saved_state}
            self._set_attrs(if_all_succeed(lambda: self._bcast_object(values), RuntimeError))
            ObjectState.save(self)

    def _objects(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _resume(self, commits: Commits) -> None:
        """Load the newest of `commits`, and let `commit` write to them. Collective."""
        objects = self._objects()
        if commits.resume(objects):
            self._set_attrs({name: value for name, value in objects.items() if not is_stateful(value)})
            self.save()
            self.on_reset()
        self._commits = commits

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def _set_attrs(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def _check_names(names: Iterable[str], private: Iterable[str] = ()) -> None:
    for name in names:
        if hasattr(TorchState, name) or (name.startswith("_") and name in private):
            raise ValueError(f"A value must not be named {name!r}, which State has. Choose another name.")


def _copy_containers(value: Any) -> Any:
    return copy.deepcopy(value) if isinstance(value, _CONTAINERS) else value


class TorchState(ObjectState):
    """Models, optimizers, samplers and plain values, each an attribute under its keyword.

    Args:
        model, optimizer: objects with a handler or a `state_dict`. Further ones can be given as kwargs.
        kwargs: a value with a handler (modules, optimizers, samplers, see `set_handler_registry`) is saved and shared
            by its handler, an object with `state_dict` and `load_state_dict` (schedulers, GradScaler) by these methods,
            any other value as in ObjectState.

    Setting such an attribute to another object saves the new object. Raises ValueError as ObjectState does, TypeError
    for an object with a different state on each rank.
    """

    def __init__(self, model: torch.nn.Module | None = None, optimizer: Optimizer | None = None, **kwargs: Any) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        _check_names(values)
        kinds = {name: handler_class(name, value) for name, value in values.items()}
        for name, value in (("model", model), ("optimizer", optimizer)):
            if value is not None and kinds[name] is None:
                rule = f"None or {'a module' if name == 'model' else 'an optimizer'}"
                raise checks.wrong(name, rule, value, "Name other values otherwise.", TypeError)
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
            self._handle(name, value)
        super().__setattr__(name, value)

    def _handle(self, name: str, value: Any) -> None:
        """Save `value`, a new value of a known name, with the handler of its type."""
        kind, handler = handler_class(name, value), self._handlers.get(name)
        if kind is None:
            self._handlers.pop(name, None)
            self._saved_state.setdefault(name, _copy_containers(value))
        elif type(handler) is kind:
            handler.set_value(value)
        else:
            self._saved_state.pop(name, None)
            self._handlers[name] = kind(value)
            self._handlers[name].save()
