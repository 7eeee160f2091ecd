"""The loop around an elastic training function: share the state, train, and after a failure begin again."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import HorovodInternalError, HostsUpdatedInterrupt
from ..lifecycle import init, shutdown
from ..world.context import current
from .restarting import restarting
from .state import State, commits_made

__all__ = ("run", "run_fn")

logger = logging.getLogger("dualdist")

_MOST_FAILURES = 10
"""After so many in a row without a commit, training fails for a reason of its own; horovodrun has --reset-limit."""

T = TypeVar("T")


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Decorate a training function `func(state, ...)` so that it outlives failed collectives and changes of hosts.

    The wrapper shares the state and calls `func`. When a collective raises HorovodInternalError, every rank goes back
    to the state's last commit; on HostsUpdatedInterrupt they keep what they have. Then every rank leaves the world,
    joins it anew with the arguments of the first `init()`, calls the reset callbacks, and calls `func` again. Process
    sets that were added later must be added again in a reset callback. Any other exception ends the process, and so
    does the HorovodInternalError that is the tenth in a row without a commit in between.

    Collective: every rank must call it, after `init()`, with a `State` as first argument. What it can recover from is
    said in the docstring of this package.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> T:
        _check_state(state)
        if not current().launch.restarts:
            return run_fn(func, _rejoin)(state, *args, **kwargs)
        with restarting(state) as rejoin:
            return run_fn(func, rejoin)(state, *args, **kwargs)

    return wrapper


def run_fn(func: Callable[..., T], reset: Callable[[], None]) -> Callable[..., T]:
    """Do what `run` does with another way to join the world anew (horovod/common/elastic.py, run_fn)."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> T:
        _check_state(state)
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
                    logger.warning("Going back to the last commit, as a collective has failed: %s", error)
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


def _rejoin() -> None:
    arguments = current().arguments
    shutdown()
    init(**arguments)
