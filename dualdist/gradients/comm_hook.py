"""Communication hooks: functions of the user that combine the gradients of a bucket, with torch's interface.

A hook may run several collectives for a bucket, the later ones in callbacks of the earlier ones (PowerSGD). So that all
ranks run them in the same order, a bucket's hook is called when that of the bucket before has finished. Nothing waits
for this before the ranks have announced the reduction: a rank that has called `join` takes part only after that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..backends.base import Work
from ..checks import wrong
from ..errors import HorovodInternalError
from .grad_bucket import GradBucket

__all__ = ("CommHook", "HookQueue", "HookWork", "checked_comm_hook")

_FIX = "Pass a function, or a tuple of its state and the function."


@dataclass(frozen=True)
class CommHook:
    """A hook and its state."""

    hook: Callable[[Any, Any], Any]
    """hook(state, bucket) returns a torch.futures.Future of the bucket's new buffer."""
    state: Any = None

    @property
    def name(self) -> str:
        """Its name, which must be equal on all ranks."""
        return str(getattr(self.hook, "__qualname__", type(self.hook).__qualname__))


def checked_comm_hook(comm_hook: Any) -> CommHook | None:
    """Return `comm_hook`, a hook or (state, hook), as a CommHook. Raises TypeError."""
    if comm_hook is None:
        return None
    state, hook = comm_hook if isinstance(comm_hook, tuple) and len(comm_hook) == 2 else (None, comm_hook)
    if not callable(hook):
        raise wrong("comm_hook", "a communication hook", comm_hook, _FIX, TypeError)
    return CommHook(hook, state)


class HookWork(Work):
    """A bucket that a hook combines, or is going to combine."""

    def __init__(self, queue: HookQueue, hook: CommHook, bucket: GradBucket) -> None:
        self._queue = queue
        self._hook = hook
        self._bucket = bucket
        self.future: Any = None
        """What the hook has returned; None before it is called."""

    def start(self) -> None:
        """Call the hook. Raises what the hook raises, TypeError unless it returns a Future."""
        future = self._hook.hook(self._hook.state, self._bucket)
        if not isinstance(future, torch._C.Future):
            raise TypeError(
                f"`comm_hook` must return a torch.futures.Future, but {self._hook.name} returned a "
                f"{type(future).__name__} instead."
            )
        self.future = future

    def wait(self) -> None:
        self._queue.run_until(self)
        try:
            self.future.wait()
        except HorovodInternalError:
            raise
        except Exception as error:  # torch passes on what a callback raised as a RuntimeError
            raise HorovodInternalError(
                f"communication hook {self._hook.name} failed in bucket {self._bucket.index()}: {error}"
            ) from error

    def done(self) -> bool:
        return self.future is not None and bool(self.future.done())

    def result(self) -> torch.Tensor:
        """Return the combined gradients, (n,), after `wait`. Raises ValueError if the hook returned something else."""
        value, expected = self.future.value(), self._bucket.buffer()
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        if not isinstance(value, torch.Tensor) or value.numel() != expected.numel():
            shown = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"`comm_hook` must return a future of a tensor of shape {tuple(expected.shape)}, but "
                f"{self._hook.name} returned {shown} instead."
            )
        return value.reshape(-1)


class HookQueue:
    """Runs hooks one after the other, in the order of the buckets."""

    def __init__(self) -> None:
        self._waiting: deque[HookWork] = deque()
        self._current: HookWork | None = None

    def submit(self, hook: CommHook, bucket: GradBucket) -> HookWork:
        """Queue `bucket`. Call its hook at once if the one before has finished."""
        work = HookWork(self, hook, bucket)
        self._waiting.append(work)
        self.advance()
        return work

    def advance(self) -> None:
        """Call hooks until one of them needs time. Does not wait."""
        while self._waiting and (self._current is None or self._current.done()):
            self._start_next()

    def run_until(self, work: HookWork) -> None:
        """Call hooks until that of `work` is called. Waits for those before it."""
        while work.future is None:
            if work not in self._waiting:
                raise HorovodInternalError("a communication hook has failed before")
            if self._current is not None:
                self._current.wait()
            self._start_next()

    def _start_next(self) -> None:
        self._current, work = None, self._waiting.popleft()
        work.start()
        self._current = work
