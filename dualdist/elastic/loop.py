"""The loop around an elastic training function: share the state, train, and start again after a failure."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from .. import checks
from ..errors import ConfigurationError, HorovodInternalError, HostsUpdatedInterrupt
from ..lifecycle import init, shutdown
from ..world.context import current
from .restarts import restarting
from .state import State, commits_made

logger = logging.getLogger("dualdist")

_MOST_FAILURES = 10
"""After this many failures in a row without a commit, `run` raises the error. (horovodrun has --reset-limit.)"""

T = TypeVar("T")


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Decorate a training function `func(state, ...)` so that it survives failed collectives and changes of hosts.

    The wrapper shares the state and calls `func`. When a collective raises HorovodInternalError, every rank returns
    to the state's last commit; on HostsUpdatedInterrupt every rank keeps its current state. Then every rank leaves the
    world, joins it again with the arguments of the first `init()`, calls the reset callbacks, and calls `func` again.
    If process sets were added after `init()`, add them again in a reset callback. Any other exception ends the
    process, and so does the tenth HorovodInternalError in a row without a commit in between.

    Collective: every rank must call it, after `init()`, with a `State` as first argument. The docstring of this package
    lists the failures that it can recover from.

    Raises ConfigurationError if the launcher can change the hosts of the job, but the backend cannot join a new world.
    """

    checks.function("func", func)

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> T:
        _check_state(state)
        if not current().launch.restarts:
            return run_fn(func, _rejoin)(state, *args, **kwargs)
        with restarting(state) as rejoin:
            return run_fn(func, rejoin)(state, *args, **kwargs)

    return wrapper


def run_fn(func: Callable[..., T], reset: Callable[[], None]) -> Callable[..., T]:
    """Do what `run` does, but call `reset` to join the world again (horovod/common/elastic.py, run_fn)."""

    checks.function("func", func)
    checks.function("reset", reset)

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> T:
        _check_state(state)
        _check_backend()
        failures, made = 0, commits_made(state)
        backend = current().backend
        backend.add_host_listener(state)
        skip_sync = False
        try:
            while True:
                try:
                    if not skip_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HorovodInternalError as error:
                    before, made = made, commits_made(state)
                    failures = failures + 1 if made is not None and made == before else 1
                    if failures == _MOST_FAILURES:
                        raise HorovodInternalError(
                            f"Training has failed {failures} times in a row without a commit, the last time: {error}"
                        ) from error
                    logger.warning("Returning to the last commit, because a collective has failed: %s", error)
                    state.restore()
                    skip_sync = False
                except HostsUpdatedInterrupt as interrupt:
                    skip_sync = interrupt.skip_sync
                reset()
                state.on_reset()
        finally:
            backend.remove_host_listener(state)

    return wrapper


def _check_state(state: Any) -> None:
    if not all(callable(getattr(state, name, None)) for name in ("sync", "restore", "on_reset")):
        raise TypeError(
            f"`state` must be a TorchState or another State, but is a {type(state).__name__} instead."
        )


def _check_backend() -> None:
    launch, backend = current().launch, current().backend
    if launch.elastic and not backend.is_elastic:
        raise ConfigurationError(
            f"Elastic training under {launch.launcher} must run on backend 'horovod', but runs on {backend.name!r} "
            'instead, which cannot form a new world there. Call init(backend="horovod") or set '
            "DUALDIST_BACKEND=horovod, or start with torchrun."
        )


def _rejoin() -> None:
    arguments = current().arguments
    shutdown()
    init(**arguments)
