"""The names of horovod.common.elastic, horovod.torch.elastic.state and horovod.runner.elastic.worker."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from .. import elastic
from ..elastic import State, StateHandler, get_handler_registry

_T = TypeVar("_T")


class HostUpdateResult(enum.IntFlag):
    """How the hosts of an elastic job have changed."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class WorkerNotificationManager:
    """Passes changes of hosts to its listeners. The messages of horovodrun reach them through the backend instead."""

    def __init__(self) -> None:
        self._listeners: set[Any] = set()

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the backend receives the messages of the launcher."""

    def register_listener(self, listener: Any) -> None:
        """Call `listener.on_hosts_updated` at each change."""
        self._listeners.add(listener)

    def remove_listener(self, listener: Any) -> None:
        """Stop calling `listener`. Raises KeyError for one that is not registered."""
        self._listeners.remove(listener)

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Report a change to all listeners. timestamp: in seconds. update_res: a HostUpdateResult."""
        for listener in self._listeners:
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()
"""States register here while `run` runs."""


def _listening(func: Callable[..., _T]) -> Callable[..., _T]:
    """Return `func` with its state, the first argument, registered at the notification manager meanwhile."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> _T:
        notification_manager.init()
        notification_manager.register_listener(state)
        try:
            return func(state, *args, **kwargs)
        finally:
            notification_manager.remove_listener(state)

    return wrapper


def run(func: Callable[..., _T]) -> Callable[..., _T]:
    """Decorate a training function as dualdist.elastic.run does."""
    return _listening(elastic.run(func))


def run_fn(func: Callable[..., _T], reset: Callable[[], None]) -> Callable[..., _T]:
    """Do what `run` does, but call `reset` to join the world again."""
    return _listening(elastic.run_fn(func, reset))


def _union(sets: Iterable[Iterable[Any]]) -> set[Any]:
    return set().union(*sets)


def _get_handler(value: Any) -> StateHandler | None:
    """Return a new handler for `value`; None for a plain value."""
    found = (handler(value) for kind, handler in get_handler_registry() if isinstance(value, kind))
    return next(found, None)


def _get_handlers(values: Mapping[str, Any]) -> tuple[dict[str, StateHandler], dict[str, Any]]:
    """Return the handlers of the `values` that have one, by name, and the plain values."""
    handlers = {name: handler for name, value in values.items() if (handler := _get_handler(value)) is not None}
    return handlers, {name: value for name, value in values.items() if name not in handlers}
