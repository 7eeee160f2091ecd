"""What a call of the process group returns: requests of MPI under way, and what follows from them."""

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
)
FORKED += "Use it in the parent alone, or start the child by spawning."

_SPIN_SECONDS, _SLEEP_SECONDS = 0.2, 0.001
_NO_LIMIT = timedelta(0)
_unfinished: list[Any] = []
"""What was given up: MPI may still write there when the late rank comes."""


class MpiWork(dist.Work):
    """Requests of MPI, ended by whoever tests them last: the thread of `progress`, or one that waits."""

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
        """Take over `requests`.

        kept: what must live as long as MPI may use it. status: MPI's, filled by the last request. expires: whether the
        group's timeout counts from now on; it counts from `wait` in any case.
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
        if not self._lock.acquire(blocking=False):  # another thread is at it
            return False
        try:
            if not self._ended:
                if not self._tested():
                    return False
                if self._finish is not None:
                    with (
                        torch.inference_mode()
                    ):  # the mode of the caller's thread says what may be written to
                        self._finish()
                self._end(None)
        except Exception as error:
            self._end(str(error))
        finally:
            self._lock.release()
        self._tell()
        return True

    Test = poll

    def _tested(self) -> bool:
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
        self.give_up(f"it timed out after {seconds:g} s, since a member has not answered")

    def give_up(self, problem: str) -> None:
        with self._lock:
            if self._ended:
                return
            _unfinished.append((self._requests, self._kept))
            self.owner.unsettled = True
            self._end(problem)
        self._tell()

    def _end(self, problem: str | None) -> None:
        if problem is not None:
            self._problem = f"MPI: {self._what} failed on {self.owner}: {problem}."
        self._ended = True
        self._kept = self._finish = None
        progress.forget(self)

    def _tell(self) -> None:
        """Fulfil the future, whose callbacks run here."""
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
