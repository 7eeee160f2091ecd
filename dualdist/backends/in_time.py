"""Steps without a timeout of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

__all__ = ("in_time",)

T = TypeVar("T")


def in_time(step: Callable[[], T], seconds: float) -> T:
    """Return `step()`. Raises TimeoutError after `seconds`.

    The step runs in another thread, which is abandoned then.
    """
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(step())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="dualdist-step", daemon=True).start()
    try:
        return outcome.result(seconds)
    except FutureTimeoutError:
        if outcome.done():
            return outcome.result()
        raise TimeoutError(f"It did not end in {seconds:g} s.") from None
