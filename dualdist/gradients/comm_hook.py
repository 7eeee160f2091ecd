"""Communication hooks: functions of the user that combine the gradients of a bucket, with torch's interface.

A hook may run several collectives for a bucket, the later ones in callbacks of the earlier ones (PowerSGD). So that all
ranks run them in the same order, a bucket's hook is called when that of the bucket before has finished. Hooks run in a
thread: they may wait for other ranks, but backward must not wait before the ranks have announced the reduction. A rank
that has called `join` takes part only after that.

When a hook raises, its rank reports this to the others, whose hooks may wait for it. No rank that knows of it calls the
hook for a later bucket of this backward.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .. import accelerator
from ..backends.base import Backend, Work
from ..checks import wrong
from ..errors import HorovodInternalError
from .grad_bucket import GradBucket

__all__ = ("CommHook", "HookQueue", "HookWork", "checked_comm_hook")

_LOOK_AGAIN_SECONDS = 0.1
"""How often a rank that waits for its hook checks whether that of another rank has raised."""
_OWN_ERROR_SECONDS = 1.0
"""How long a rank then still waits for its own hook, which may raise too. Its own error says more."""
_LAST_HOOK_SECONDS = 10.0
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
    if not callable(hook) or isinstance(hook, type):
        raise wrong("comm_hook", "a communication hook", comm_hook, _FIX, TypeError)
    return CommHook(hook, state)


class Failures(Protocol):
    """Reports between ranks about one backward, in which some hook has raised."""

    def report_failure(self, step: str, text: str) -> None:
        """Send `text` to the other ranks, which may be waiting."""

    def failure(self, step: str) -> str | None:
        """Return what another rank has reported about `step`, None if nothing."""


class HookWork(Work):
    """A bucket that a hook combines, or is going to combine."""

    def __init__(self, hook: CommHook, bucket: GradBucket, failures: Failures, step: str) -> None:
        """step: names the backward; equal on all ranks, and another one for each backward."""
        self._hook = hook
        self._bucket = bucket
        self._failures = failures
        self.step = step
        self._device = bucket.buffer().device
        self._stream = accelerator.current_stream(self._device)
        self._ended = threading.Event()
        self._result: torch.Tensor | None = None
        self._failure: Exception | None = None
        self.error: Exception | None = None
        """What the hook has raised, unless it is a failure of the communication, which `wait` raises."""

    @property
    def has_raised(self) -> bool:
        """Whether the hook has raised an error of any kind."""
        return (self.error or self._failure) is not None

    def _failure_elsewhere(self) -> tuple[int, str] | None:
        """Return the bucket for which a hook of another rank has raised in this backward, and its error."""
        found = self._failures.failure(self.step)
        if found is None:
            return None
        place, text = found.split(" ", 1)
        return int(place), text

    @property
    def follows_failure(self) -> bool:
        """Whether a hook of another rank has raised for an earlier bucket of this backward."""
        found = self._failure_elsewhere()
        return found is not None and found[0] < self._bucket.index()

    def skip(self, raised: HookWork | None = None) -> None:
        """End without calling the hook, with the error of the bucket before for which it has `raised` here, if any."""
        if raised is not None:
            self.error, self._failure = raised.error, raised._failure
        self._ended.set()

    def report(self) -> None:
        """Report to the other ranks that the hook has raised here."""
        error = self.error or self._failure
        text = f"{self._bucket.index()} {type(error).__name__}: {error}"
        self._failures.report_failure(self.step, text)

    def run(self) -> None:
        """Call the hook, and wait for its result."""
        try:
            with torch.no_grad(), self._stream or contextlib.nullcontext():
                future = self._hook.hook(self._hook.state, self._bucket)
                if not isinstance(future, torch._C.Future):
                    raise TypeError(
                        f"`comm_hook` must return a torch.futures.Future, but {self._hook.name} returned "
                        f"{type(future).__name__} instead."
                    )
                self._result = self._checked(future.wait())
        except RuntimeError as error:  # a future turns what its callbacks raise into one
            self._failure = error
        except Exception as error:
            self.error = error
        self._ended.set()

    def _checked(self, value: Any) -> torch.Tensor:
        expected = self._bucket.buffer()
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        if not isinstance(value, torch.Tensor) or value.numel() != expected.numel():
            shown = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"`comm_hook` must return a future of a tensor of shape {tuple(expected.shape)}, but "
                f"{self._hook.name} returned {shown} instead."
            )
        return value.reshape(-1)

    def wait(self) -> None:
        """Wait for the result. Raises HorovodInternalError when the communication or another rank's hook has failed."""
        while not self._ended.wait(_LOOK_AGAIN_SECONDS):
            if self._failure_elsewhere() is not None and not self._ended.wait(_OWN_ERROR_SECONDS):
                break
        found = self._failure_elsewhere()
        if found is not None and self._result is None and self.error is None:
            raise HorovodInternalError(
                f"communication hook {self._hook.name} failed on another rank: {found[1]}"
            )
        current = accelerator.current_stream(self._device)
        if current is not None and self._stream is not None:
            current.wait_stream(self._stream)
        if isinstance(self._failure, HorovodInternalError):
            raise self._failure
        if self._failure is not None:
            raise HorovodInternalError(
                f"communication hook {self._hook.name} failed in bucket {self._bucket.index()}: {self._failure}"
            ) from self._failure

    def done(self) -> bool:
        return self._ended.is_set()

    @property
    def result(self) -> torch.Tensor | None:
        """The combined gradients, (n,), after `wait`; None if the hook raised an error."""
        return self._result


class HookQueue:
    """Runs hooks in a thread, one after the other, in the order of the buckets."""

    def __init__(self) -> None:
        self._waiting: deque[HookWork] = deque()
        self._lock = threading.Lock()
        self._is_running = False
        self._raised: HookWork | None = None
        """The last one whose hook has raised."""
        self._thread: threading.Thread | None = None

    def submit(self, work: HookWork) -> None:
        """Queue `work`."""
        with self._lock:
            self._waiting.append(work)
            if not self._is_running:
                self._is_running = True
                self._thread = threading.Thread(target=self._run, name="dualdist-comm-hook", daemon=True)
                self._thread.start()

    def close(self, backend: Backend) -> None:
        """Wait for a hook that still waits for other ranks, at most 10 s, before `backend` leaves the world. Local.

        If its collective failed later, while the interpreter ends, C++ would abort the process.
        """
        if self._thread is None or self._thread is threading.current_thread():
            return
        self._thread.join(_LOOK_AGAIN_SECONDS)
        if self._thread.is_alive():
            backend.abort_process_groups()
            self._thread.join(_LAST_HOOK_SECONDS)
        if self._thread.is_alive():
            backend.keep_process_groups()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    return
                work = self._waiting.popleft()
            if self._raised is not None and self._raised.step == work.step:
                work.skip(self._raised)
            elif work.follows_failure:
                work.skip()
            else:
                work.run()
                if work.has_raised:
                    self._raised = work
                    work.report()
