"""Steps without a timeout of their own. Each runs in another thread, which is abandoned when it takes too long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from .patience import CHECK_SECONDS, Patience

__all__ = ("in_thread", "in_time", "wait_for")

T = TypeVar("T")


def in_thread(step: Callable[[], T]) -> Future[T]:
    """Start `step` in another thread, and return the future of its result."""
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(step())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="dualdist-step", daemon=True).start()
    return outcome


def in_time(step: Callable[[], T], seconds: float) -> T:
    """Return `step()`. Raises TimeoutError after `seconds`."""
    outcome = in_thread(step)
    try:
        return outcome.result(seconds)
    except FutureTimeoutError:
        if outcome.done():
            return outcome.result()
        raise TimeoutError(f"It did not end in {seconds:g} s.") from None


def wait_for(outcome: Future[T], patience: Patience) -> T:
    """Return the result of a step. Raises StallError or HorovodInternalError when `patience` runs out first."""
    while not outcome.done():
        try:
            return outcome.result(CHECK_SECONDS)
        except FutureTimeoutError:
            patience.check()
    return outcome.result()
