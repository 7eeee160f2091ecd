"""The object that a call of the process group returns: its pending MPI requests and its result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .progress import progress

__all__ = ("FORKED", "MpiWork")

FORKED = (
    "MPI: a process group must be used by the process that joined it, but is used in a forked child instead. "
    "Use it only in the parent, or start the child by spawning."
)

_SPIN_SECONDS, _SLEEP_SECONDS = 0.2, 0.001
_NO_LIMIT = timedelta(0)
_unfinished: list[Any] = []
"""Requests that were given up, and their buffers: MPI may still write to them when the late rank arrives."""


class MpiWork(dist.Work):
    """Pending MPI requests. The progress thread and waiting threads test them."""

    def __init__(
        self,
        what: str,
        owner: Any,
        requests: list[Any],
        kept: object,
        *,
        finish: Callable[[], None] | None,
        result: list[torch.Tensor],
        status: Any = None,
        expires: bool = True,
    ) -> None:
        """Take over `requests`, which are tested from the last to the first.

        what: the call, for error messages. kept: what must stay alive while MPI may use it. status: an MPI status that
        the last request fills. expires: whether the work fails once the group's timeout has passed since its start. A
        call of `wait` always fails once the timeout has passed since that call.
        """
        super().__init__()
        self.owner = owner
        self._what = what
        self._requests = requests
        self._kept = kept
        self._finish = finish
        self._result = result
        self._status = status
        self._timeout = float(owner.seconds)
        self._deadline = time.monotonic() + self._timeout if expires else None
        self._lock = threading.Lock()
        self._ended = False
        self._problem: str | None = None
        self._future: Any = None

    def poll(self) -> bool:
        if self._ended:
            return True
        if progress.forked:
            raise RuntimeError(FORKED)
        if not self._lock.acquire(blocking=False):  # another thread tests it
            return False
        try:
            if not self._ended:
                if not self._test_requests():
                    return False
                if self._finish is not None:
                    # A tensor made in inference mode can only be written in that mode.
                    with torch.inference_mode():
                        self._finish()
                self._end(None)
        except Exception as error:
            self._end(str(error))
        finally:
            self._lock.release()
        self._fulfil_future()
        return True

    Test = poll  # so that a work of coalesced calls can test its works like MPI requests

    def _test_requests(self) -> bool:
        """Return whether all requests have completed."""
        requests = self._requests
        while requests:
            with progress.calls:
                done = requests[-1].Test(self._status) if self._status is not None else requests[-1].Test()
            if not done:
                return False
            requests.pop()
        return True

    def expire(self, now: float) -> None:
        if self._deadline is not None and now > self._deadline:
            self._time_out(self._timeout)

    def _time_out(self, seconds: float) -> None:
        self.give_up(f"it timed out after {seconds:g} s, since a member did not take part")

    def give_up(self, problem: str) -> None:
        with self._lock:
            if self._ended:
                return
            _unfinished.append((self._requests, self._kept))
            self.owner.unsettled = True
            self._end(problem)
        self._fulfil_future()

    def _end(self, problem: str | None) -> None:
        if problem is not None:
            self._problem = f"MPI: {self._what} failed on {self.owner}: {problem}."
        self._ended = True
        self._kept = self._finish = None
        progress.forget(self)

    def _fulfil_future(self) -> None:
        """Set the result of the future, if there is one. Its callbacks run in this thread."""
        with self._lock:
            future, self._future = self._future, None
        if future is not None:
            _fulfil(future, self._result, self._problem)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        if not self.poll():
            self._wait(timeout.total_seconds())
        if self._problem is not None:
            raise RuntimeError(self._problem)
        return True

    def _wait(self, asked: float) -> None:
        start = time.monotonic()
        limit = asked if asked > 0 else self._timeout
        progress.waiting.add(self)
        try:
            while not self.poll():
                waited = time.monotonic() - start
                if waited > limit:
                    if asked > 0:
                        raise RuntimeError(f"MPI: {self._what} timed out after {limit:g} s on {self.owner}.")
                    self._time_out(limit)
                time.sleep(0 if waited < _SPIN_SECONDS else _SLEEP_SECONDS)
        finally:
            progress.waiting.discard(self)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.poll()

    def is_success(self) -> bool:
        return self.poll() and self._problem is None

    def exception(self) -> RuntimeError | None:
        return None if self._problem is None else RuntimeError(self._problem)

    def result(self) -> list[torch.Tensor]:
        return self._result

    def source_rank(self) -> int:
        self.wait()
        return int(self._status.Get_source())

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        with self._lock:
            if not self._ended:
                first, self._future = self._future, self._future or future
                return first or future
        _fulfil(future, self._result, self._problem)
        return future


def _fulfil(future: Any, result: list[torch.Tensor], problem: str | None) -> None:
    if problem is None:
        future.set_result(result)
    else:
        future.set_exception(RuntimeError(problem))
