"""The object that a call of the process group returns: its pending MPI requests and its result."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...compiling import not_compiled
from .callbacks import callbacks
from .communicator import Operation
from .progress import progress

__all__ = ("FORKED", "MpiWork")

FORKED = (
    "MPI: a process group must be used by the process that joined it, but is used in a forked child instead. "
    "Use it only in the parent, or start the child by spawning."
)

_SPIN_SECONDS, _SLEEP_SECONDS = 0.2, 0.001
_NO_LIMIT = timedelta(0)
_SMALL_BYTES = 64
_unfinished: list[Any] = []
"""Requests that were given up, and their buffers: MPI may still write to them when the late rank arrives."""


@not_compiled
class MpiWork(dist.Work):
    """Pending MPI requests. The progress thread and waiting threads test them."""

    def __init__(
        self,
        what: str,
        owner: Any,
        requests: list[Any],
        operations: Sequence[Operation],
        *,
        result: list[torch.Tensor],
        range_: Any = None,
        status: Any = None,
        seconds: float | None = None,
        expires: bool = True,
    ) -> None:
        """Take over the `requests` of `operations`. They are tested from the last to the first.

        what: the call, for error messages. range_: a future that ends a range of the profiler. status: an MPI status
        that the last request fills. seconds: the timeout, by default the group's. expires: whether the work fails once
        the timeout has passed since its start. A call of `wait` always fails once the timeout has passed since that
        call.
        """
        super().__init__()
        self.owner = owner
        self._what = what
        self._requests = requests
        self._operations = operations
        self._further = [operation.further for operation in operations if operation.further is not None]
        self._result = result
        self._range = range_
        self._status = status
        self._timeout = float(owner.seconds) if seconds is None else seconds
        self._deadline = time.monotonic() + self._timeout if expires else None
        self._waited_since: float | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._problem: str | None = None
        self._future: Any = None

    def __del__(self) -> None:
        """Stay alive if the result is small: C++ may still use this work, but does not keep its Python half alive.

        torch's DDP does this in `join`: it passes the work of a collective of one number to its C++ half.
        """
        if _num_bytes(self._result) <= _SMALL_BYTES:
            self.owner.dropped.append(self)

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
                for operation in self._operations:
                    if operation.finish is not None:
                        # A tensor made in inference mode can only be written in that mode.
                        with torch.inference_mode():
                            operation.finish()
                self._end(None)
        except Exception as error:
            self._end(str(error))
        finally:
            self._lock.release()
        self._fulfil_future()
        return True

    Test = poll  # so that a work of coalesced calls can test its works like MPI requests

    def _test_requests(self) -> bool:
        """Return whether all requests have completed, also those that the operations post after the first ones."""
        requests = self._requests
        while requests or self._further:
            with progress.calls:
                if not requests:
                    requests.extend(self._further.pop()())
                    continue
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
            _unfinished.append((self._requests, self._operations))
            self.owner.unsettled = True
            self._end(problem)
        self._fulfil_future()

    def _end(self, problem: str | None) -> None:
        if problem is not None:
            self._problem = f"MPI: {self._what} failed on {self.owner}: {problem}."
        if self._range is not None:
            # Before a waiting thread can see the end and stop the profiler, whose memory the range writes to.
            self._range.set_result(None)
        self._ended = True
        self._operations = ()
        self._further = []
        progress.forget(self)

    def _fulfil_future(self) -> None:
        """Set the result of the future, if there is one. Its callbacks run in another thread; see callbacks.py."""
        with self._lock:
            future, self._future = self._future, None
        if future is not None:
            callbacks.run(functools.partial(_fulfil, future, self._result, self._problem))

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        if not self.poll():
            self._wait(timeout.total_seconds())
        if self._problem is not None:
            raise RuntimeError(self._problem)
        return True

    def _wait(self, asked: float) -> None:
        start = time.monotonic()
        if self._waited_since is None:
            self._waited_since = start
        limit = asked if asked > 0 else self._timeout
        progress.waiting.add(self)
        try:
            while not self.poll():
                now = time.monotonic()
                if now - start > limit:
                    if asked > 0:
                        raise RuntimeError(f"MPI: {self._what} timed out after {limit:g} s on {self.owner}.")
                    self._time_out(limit)
                time.sleep(0 if now - self._waited_since < _SPIN_SECONDS else _SLEEP_SECONDS)
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


def _num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if not tensor.is_sparse)


def _fulfil(future: Any, result: list[torch.Tensor], problem: str | None) -> None:
    if problem is None:
        future.set_result(result)
    else:
        future.set_exception(RuntimeError(problem))
