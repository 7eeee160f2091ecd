"""Communication hooks: functions of the user that combine the gradients of a bucket, with torch's interface.

A hook may run several collectives for a bucket, the later ones in callbacks of the earlier ones (PowerSGD). So that all
ranks run them in the same order, a bucket's hook is called when that of the bucket before has finished. Hooks run in a
thread: they may wait for other ranks, but backward must not wait before the ranks have announced the reduction. A rank
that has called `join` takes part only after that.

Some of torch's own hooks start one collective and wait for nothing. Backward calls these itself, without the
switches to a thread and back.

When a hook raises, its rank reports this to the others, whose hooks may wait for it. No rank that knows of it calls the
hook for a later bucket of this backward.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from .. import accelerator
from ..backends.base import Backend, Work
from ..checks import wrong
from ..errors import HorovodInternalError
from .bucket_memory import GradientSlot
from .tracked_parameter import TrackedParameter

__all__ = ("CommHook", "CommHookState", "GradBucket", "HookQueue", "HookWork", "checked_comm_hook")

# A bucket of gradients as communication hooks see it, with the interface of torch.distributed.GradBucket.


class GradBucket:
    """The gradients of one bucket. torch's own class has no constructor in Python."""

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        slots: Sequence[GradientSlot],
        params: Sequence[TrackedParameter],
        is_last: bool,
    ) -> None:
        """slots, params: of the gradients in `buffer`, in the same order. Those without elements are left out."""
        self._index = index
        self._buffer = buffer
        self._slots = slots
        self._params = params
        self._is_last = is_last

    def _members(self) -> Iterator[tuple[GradientSlot, torch.Tensor]]:
        for slot, param in zip(self._slots, self._params, strict=True):
            if slot.shape.numel():
                yield slot, param.tensor

    def index(self) -> int:
        """Return the number of the bucket; 0 is the first that is sent."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return all gradients of the bucket, (n,). They are not divided by the number of ranks."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return each gradient, a view of the buffer with the shape of its parameter."""
        return [
            torch.view_as_complex(slot.view(self._buffer)) if param.is_complex() else slot.view(self._buffer)
            for slot, param in self._members()
        ]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of `gradients`."""
        return [param for _, param in self._members()]

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the backward."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the buffer by a tensor of the same shape."""
        self._buffer = buffer


_LOOK_AGAIN_SECONDS = 0.1
"""How often a rank that waits for its hook checks whether that of another rank has raised."""
_OWN_ERROR_SECONDS = 1.0
"""How long a rank then still waits for its own hook, which may raise too. Its own error says more."""
_LATER_SECONDS = 1.0
"""How much later than the collectives of a hook the hook itself has stalled: their errors say more."""
_LAST_HOOK_SECONDS = 10.0
_TORCH = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
_ONLY_START = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")
"""Functions of that module that start one collective for a bucket, and wait for nothing."""
_FIX = "Pass a function, or a tuple of its state and the function."


@dataclass(frozen=True)
class CommHook:
    """A hook and its state."""

    hook: Callable[[Any, Any], Any]
    """hook(state, bucket) returns a torch.futures.Future of the bucket's new buffer."""
    state: Any = None

    @functools.cached_property
    def name(self) -> str:
        """Its name, which must be equal on all ranks."""
        return str(getattr(self.hook, "__qualname__", type(self.hook).__qualname__))

    @functools.cached_property
    def only_starts(self) -> bool:
        """Whether it is known to start one collective for a bucket, and to wait for nothing."""
        return getattr(self.hook, "__module__", None) == _TORCH and self.name in _ONLY_START


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

    def deadline(self) -> float:
        """Return when a wait that begins now has stalled, on the clock of `time.monotonic`."""


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
        self.only_starts = hook.only_starts
        self.when_ended: Callable[[HookWork], object] = lambda work: None
        """Called when its result has been waited for."""
        self._is_finished = False
        self._is_followed = False
        """Whether `_ended` is set at the end of `_future`."""
        self._ended = threading.Event()
        self._future: torch._C.Future[Any] | None = None
        """Of the result, until it has been waited for."""
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
        self._end()

    def _report(self) -> None:
        error = self.error or self._failure
        text = f"{self._bucket.index()} {type(error).__name__}: {error}"
        self._failures.report_failure(self.step, text)

    def start(self) -> None:
        """Call the hook. `finish` waits for its result."""
        with self._noting_errors():
            future = self._hook.hook(self._hook.state, self._bucket)
            if not isinstance(future, torch._C.Future):
                raise TypeError(
                    f"`comm_hook` must return a torch.futures.Future, but {self._hook.name} returned "
                    f"{type(future).__name__} instead."
                )
            self._future = future

    def finish(self) -> None:
        """Wait for the result of the hook, which has started. Report to the other ranks if it has raised."""
        if self._is_finished:
            return
        if self._future is not None:
            with self._noting_errors():
                self._result = self._checked(self._future.wait())
        self._end()
        if self.has_raised:
            self._report()

    def _end(self) -> None:
        self._is_finished, self._future = True, None
        self._ended.set()
        self.when_ended(self)

    def ends_within(self, seconds: float) -> bool:
        """Wait at most `seconds` for the result. Return whether it, or an error, is there."""
        if self.done():
            return True
        if self._future is not None and self.only_starts and not self._is_followed:
            self._is_followed = True
            self._future.add_done_callback(lambda _: self._ended.set())
        return self._ended.wait(seconds)

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            with torch.no_grad(), self._stream or contextlib.nullcontext():
                yield
        except RuntimeError as error:  # a future turns what its callbacks raise into one
            self._failure = error
        except Exception as error:
            self.error = error

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
        deadline = self._failures.deadline() + _LATER_SECONDS
        while not self.ends_within(_LOOK_AGAIN_SECONDS):
            if self._failure_elsewhere() is not None and not self.ends_within(_OWN_ERROR_SECONDS):
                break
            if time.monotonic() > deadline:
                self._failure = HorovodInternalError(
                    f"communication hook {self._hook.name} has not set its future of bucket {self._bucket.index()} "
                    "before the stall timeout"
                )
                self._report()
                break
        else:
            self.finish()
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

    def wait_for(self, seconds: float) -> None:
        if self.only_starts:
            self.ends_within(seconds)

    def done(self) -> bool:
        if self._ended.is_set():
            return True
        return self.only_starts and self._future is not None and bool(self._future.done())

    @property
    def result(self) -> torch.Tensor | None:
        """The combined gradients, (n,), after `wait`; None if the hook raised an error."""
        return self._result


class HookQueue:
    """Runs hooks one after the other, in the order of the buckets: in a thread, unless they only start a collective."""

    def __init__(self) -> None:
        self._waiting: deque[HookWork] = deque()
        self._lock = threading.Lock()
        self._is_running = False
        self._raised: HookWork | None = None
        """The last one whose hook has raised."""
        self._thread: threading.Thread | None = None
        self._started: set[HookWork] = set()
        """Those that backward has started itself, and has not waited for."""

    def submit(self, work: HookWork) -> None:
        """Queue `work`, or start it at once if its hook waits for nothing."""
        if work.only_starts:
            # Drop those that have ended: nobody waits for those of a backward that was given up.
            self._started.difference_update([other for other in self._started if other.done()])
            self._started.add(work)
            work.when_ended = self._started.discard
            self._call(work)
            return
        with self._lock:
            self._waiting.append(work)
            if not self._is_running:
                self._is_running = True
                self._thread = threading.Thread(target=self._run, name="dualdist-comm-hook", daemon=True)
                self._thread.start()

    def close(self, backend: Backend) -> None:
        """Wait for a hook that still waits for other ranks, at most 10 s, before `backend` leaves the world. Local.

        If its collective failed later, while the interpreter ends, C++ would abort the process. If it still waits
        then, the process waits up to 10 s more at exit. A rank whose hook has raised stays connected as long as it
        keeps the exception, whose traceback refers to the process group.
        """
        if self._thread is threading.current_thread() or self._ends_within(_LOOK_AGAIN_SECONDS):
            return
        backend.abort_process_groups()
        if not self._ends_within(_LAST_HOOK_SECONDS):
            backend.keep_process_groups()
            # The script may end soon, and the other ranks with it.
            atexit.register(self._ends_within, _LAST_HOOK_SECONDS)

    def _ends_within(self, seconds: float) -> bool:
        """Wait at most `seconds` for all hooks. Return whether they have ended."""
        end = time.monotonic() + seconds
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return False
        return all(work.ends_within(max(end - time.monotonic(), 0.0)) for work in list(self._started))

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    return
                work = self._waiting.popleft()
            self._call(work)

    def _call(self, work: HookWork) -> None:
        if self._raised is not None and self._raised.step == work.step:
            work.skip(self._raised)
        elif work.follows_failure:
            work.skip()
        else:
            work.start()
            if work.has_raised or not work.only_starts:
                work.finish()
            if work.has_raised:
                self._raised = work


# The state of a communication hook in checkpoints.

_PLAIN = (bool, int, float, str, bytes, type(None), torch.Tensor)
_PYTHON, _NUMPY = "random.Random", "numpy.random.RandomState"


class CommHookState:
    """Saves and loads the state of a communication hook, such as torch's PowerSGDState.

    Every rank's state is saved, because ranks remember different errors. In a larger world, a rank without a saved
    state gets that of another rank. Attributes are saved if they are numbers, strings, tensors, containers of these or
    random number generators. Others, such as process groups, are left as they are.
    """

    per_rank = True

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes, in values that `torch.load(weights_only=True)` accepts."""
        names = getattr(type(self._state), "__slots__", None) or vars(self._state)
        values = {name: getattr(self._state, name) for name in names if hasattr(self._state, name)}
        return {name: _encoded(value) for name, value in values.items() if _is_saved(value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the attributes."""
        for name, value in state.items():
            setattr(self._state, name, _decoded(value))

    def load_derived(self, states: Sequence[dict[str, Any]], rank: int) -> None:
        """Set the attributes of a rank that has no state in `states`."""
        self.load_state_dict(states[rank % len(states)])


def _is_saved(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_saved, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_saved, value))
    return isinstance(value, (*_PLAIN, random.Random, np.random.RandomState))


def _encoded(value: Any) -> Any:
    if isinstance(value, random.Random):
        return {_PYTHON: value.getstate()}
    if isinstance(value, np.random.RandomState):
        kind, keys, *rest = value.get_state(legacy=True)
        return {_NUMPY: (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest)}
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {_PYTHON}:
        python = random.Random()
        python.setstate(value[_PYTHON])
        return python
    if isinstance(value, dict) and value.keys() == {_NUMPY}:
        kind, keys, *rest = value[_NUMPY]
        generator = np.random.RandomState()
        generator.set_state((kind, keys.numpy().astype(np.uint32), *rest))
        return generator
    return value
