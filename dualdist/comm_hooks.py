"""Communication hooks: functions of the user that combine the gradients of a bucket, with torch's interface.

A hook may run several collectives for a bucket, the later ones in callbacks of the earlier ones (PowerSGD). So that all
ranks run them in the same order, a bucket's hook is called when that of the bucket before has finished. Hooks run in a
thread: they may wait for other ranks, but backward must not wait before the ranks have announced the reduction. A rank
that has called `join` takes part only after that.

Some of torch's own hooks start one collective and wait for nothing. Backward calls these itself.

When a hook raises, its rank reports this to the others. None calls it for a later bucket of this backward.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .core.agreement.channel import Channel
from .core.backends.base import Work
from .core.checks import wrong
from .core.gradients.buckets import Bucket
from .core.process import at_exit
from .devices import streams
from .devices.groups import abort_process_groups, keep_process_groups
from .errors import HorovodInternalError

# A bucket of gradients as communication hooks see it, with the interface of torch.distributed.GradBucket.


class GradBucket:
    """The gradients of one bucket. torch's own class has no constructor in Python."""

    def __init__(self, index: int, buffer: torch.Tensor, bucket: Bucket, is_last: bool) -> None:
        """bucket: what is in `buffer`. Gradients without elements are left out."""
        self._index, self._buffer, self._is_last = index, buffer, is_last
        pairs = zip(bucket.slots, bucket.params, strict=True)
        self._gradients = [(slot, param.tensor) for slot, param in pairs if slot.shape.numel()]

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
            for slot, param in self._gradients
        ]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of `gradients`."""
        return [param for _, param in self._gradients]

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

    def queue(self) -> HookQueue:
        """Return what calls it for the buckets of a reducer."""
        return HookQueue(self)


def checked_comm_hook(comm_hook: Any) -> CommHook:
    """Return `comm_hook`, a hook or (state, hook), as a CommHook. Raises TypeError."""
    state, hook = comm_hook if isinstance(comm_hook, tuple) and len(comm_hook) == 2 else (None, comm_hook)
    if not callable(hook) or isinstance(hook, type):
        fix = "Pass a function, or a tuple of its state and the function."
        raise wrong("comm_hook", "a communication hook", hook, fix, TypeError)
    return CommHook(hook, state)


class HookedBucket(Work):
    """A bucket that a hook combines, or is going to combine."""

    def __init__(self, hook: CommHook, bucket: GradBucket, channel: Channel, step: str, stream: Any = None) -> None:
        """stream: on which the hook runs, after the work that this thread's stream has now."""
        self._hook, self._bucket, self._channel, self.step, self._stream = hook, bucket, channel, step, stream
        self.device = bucket.buffer().device
        if stream is not None:
            self._packed = streams.record_event(self.device)
            streams.keep_until_done(bucket.buffer(), stream)
        self.only_starts = hook.only_starts
        self._future: torch._C.Future[Any] | None = None
        """Of the result, until it has been waited for."""
        self._ended = threading.Event()
        self.result: torch.Tensor | None = None
        """The combined gradients, (n,), after `wait`; None if the hook has raised an error."""
        self.error: Exception | None = None
        """What the hook has raised. A RuntimeError is a failure of the communication, as futures report it."""

    def _failure_elsewhere(self) -> tuple[int, str] | None:
        """Return the bucket for which a hook of another rank has raised in this backward, and its error."""
        found = self._channel.gradient_observer.failures.get(self.step)
        if found is None:
            return None
        place, text = found.split(" ", 1)
        return int(place), text

    def call(self, raised: HookedBucket | None) -> None:
        """Call the hook, unless one has raised for an earlier bucket of this backward. raised: the last one here."""
        found = self._failure_elsewhere()
        if raised is not None and raised.step == self.step:
            self.error = raised.error
        elif found is None or found[0] >= self._bucket.index():
            self.start()
        if self._future is None or not self.only_starts:
            self.finish()

    def start(self) -> None:
        """Call the hook. `finish` waits for its result."""
        with self._reporting_errors():
            if self._stream is not None:
                streams.wait_event(self.device, self._packed)
            future = self._hook.hook(self._hook.state, self._bucket)
            if not isinstance(future, torch._C.Future):
                raise TypeError(
                    f"`comm_hook` must return a torch.futures.Future, but {self._hook.name} returned "
                    f"{type(future).__name__} instead."
                )
            self._future = future

    def finish(self) -> None:
        """Wait for the result of the hook, if it has started and nobody has waited yet."""
        future, self._future = self._future, None
        if future is not None:
            with self._reporting_errors():
                self.result = self._checked(future.wait())
        self._ended.set()

    @contextlib.contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        stream = contextlib.nullcontext() if self._stream is None else streams.use_stream(self._stream)
        try:
            with torch.no_grad(), stream:
                yield
        except Exception as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        self.error = error
        text = f"{self._bucket.index()} {type(error).__name__}: {error}"
        self._channel.gradient_observer.report_failure(self.step, text)

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
        deadline = self._channel.deadline() + _LATER_SECONDS
        while not self.ends_within(_LOOK_AGAIN_SECONDS):
            if self._failure_elsewhere() is not None and not self.ends_within(_OWN_ERROR_SECONDS):
                break
            if time.monotonic() > deadline:
                text = f"communication hook {self._hook.name} has not set its future of bucket {self._bucket.index()}"
                self._report(HorovodInternalError(f"{text} before the stall timeout"))
                break
        else:
            self.finish()
        found, has_failed = self._failure_elsewhere(), isinstance(self.error, RuntimeError)
        if found is not None and self.result is None and (self.error is None or has_failed):
            raise HorovodInternalError(f"communication hook {self._hook.name} failed on another rank: {found[1]}")
        if (current := streams.current_stream(self.device)) is not None and self._stream is not None:
            streams.wait_event(self.device, streams.record_event(self.device, self._stream))
            if self.result is not None:
                streams.keep_until_done(self.result, current)
        if isinstance(self.error, HorovodInternalError):
            raise self.error
        if has_failed:
            raise HorovodInternalError(
                f"communication hook {self._hook.name} failed in bucket {self._bucket.index()}: {self.error}"
            ) from self.error

    def ends_within(self, seconds: float) -> bool:
        """Wait at most `seconds` for the result. Return whether it, or an error, is there."""
        if self.only_starts and self._future is not None and not self.done():
            self._future.add_done_callback(lambda _: self._ended.set())
        return self.done() or self._ended.wait(seconds)

    def wait_for(self, seconds: float) -> None:
        if self.only_starts:
            self.ends_within(seconds)

    def done(self) -> bool:
        has_result = self.only_starts and self._future is not None and self._future.done()
        return has_result or self._ended.is_set()


class HookQueue:
    """Runs the hook for the buckets of one reducer, in their order: in a thread, unless it only starts a collective."""

    def __init__(self, hook: CommHook) -> None:
        self._hook = hook
        self._waiting: deque[HookedBucket] = deque()
        """Those that the thread is going to call; it runs the first one."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._raised: HookedBucket | None = None
        """The last one whose hook has raised."""
        self._started: list[HookedBucket] = []
        """Those that backward has started itself. It may have been given up, so that nobody waits for them."""
        self._stream_on = functools.cache(torch.Stream)
        """The stream of hooks on a device. Backward continues on its own, while they wait for the other ranks."""

    def send(
        self, place: int, flat: torch.Tensor, bucket: Bucket, is_last: bool, channel: Channel, step: str
    ) -> HookedBucket:
        """Queue the bucket at `place`, or call the hook at once if it waits for nothing.

        Args:
            flat: the gradients of `bucket`, (n,).
            is_last: whether it is the last bucket of the backward.
            channel: reports to the other ranks, which may be waiting, that a hook has raised.
            step: names the backward; equal on all ranks, and another one for each backward.
        """
        stream = None if streams.current_stream(flat.device) is None else self._stream_on(flat.device)
        work = HookedBucket(self._hook, GradBucket(place, flat, bucket, is_last), channel, step, stream)
        if work.only_starts:
            self._started = [*(other for other in self._started if not other.done()), work]
            self._call(work)
            return work
        with self._lock:
            self._waiting.append(work)
            if len(self._waiting) == 1:
                self._thread = threading.Thread(target=self._run, name="dualdist-comm-hook", daemon=True)
                self._thread.start()
        return work

    def _run(self) -> None:
        while True:
            self._call(self._waiting[0])
            with self._lock:
                self._waiting.popleft()
                if not self._waiting:
                    return

    def _call(self, work: HookedBucket) -> None:
        work.call(self._raised)
        if work.error is not None:
            self._raised = work

    def close(self) -> None:
        """Wait for a hook that still waits for other ranks, at most 10 s, before this rank leaves the world. Local.

        If its collective failed later, while the interpreter ends, C++ would abort the process. If it still waits
        then, the process waits up to 10 s more at exit. A rank whose hook has raised stays connected as long as it
        keeps the exception, whose traceback refers to the process group.
        """
        if self._thread is threading.current_thread() or self.ends_within(_LOOK_AGAIN_SECONDS):
            return
        abort_process_groups()
        if not self.ends_within(_LAST_HOOK_SECONDS):
            keep_process_groups()
            # The script may end soon, and the other ranks with it.
            at_exit(functools.partial(self.ends_within, _LAST_HOOK_SECONDS))

    def ends_within(self, seconds: float) -> bool:
        """Wait at most `seconds` for all hooks. Return whether they have ended."""
        end = time.monotonic() + seconds
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return False
        return all(work.ends_within(max(end - time.monotonic(), 0.0)) for work in self._started)


# The state of a communication hook in checkpoints.

_PLAIN = (bool, int, float, str, bytes, type(None), torch.Tensor)
_PYTHON, _NUMPY = "random.Random", "numpy.random.RandomState"


class CommHookState:
    """Saves and loads the state of a communication hook, such as torch's PowerSGDState.

    Every rank's state is saved, because ranks remember different errors. In a larger world, a rank without a saved
    state gets that of another rank. Attributes are saved if they are numbers, strings, tensors, random number
    generators, or lists, tuples, sets and dictionaries of these. Others, such as process groups, are left as they are.
    """

    per_rank = True

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes, in values that `torch.load(weights_only=True)` accepts."""
        # A class may have `__slots__`, and its subclass a `__dict__`.
        slots = [name for kind in type(self._state).__mro__ for name in getattr(kind, "__slots__", ())]
        names = [*slots, *getattr(self._state, "__dict__", ())]
        saved = {}
        for name in names:
            with contextlib.suppress(AttributeError, TypeError):  # it is not set, or not saved
                saved[name] = _encoded(getattr(self._state, name))
        return saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the attributes."""
        for name, value in state.items():
            setattr(self._state, name, _decoded(value))

    def load_derived(self, states: Sequence[dict[str, Any]], rank: int) -> None:
        """Set the attributes of a rank that has no state in `states`."""
        self.load_state_dict(states[rank % len(states)])


def _encoded(value: Any) -> Any:
    """Return `value` as it is saved. Raises TypeError if it is left as it is."""
    if isinstance(value, dict):
        return {key: _encoded(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_encoded, value))
    if isinstance(value, random.Random):
        return {_PYTHON: value.getstate()}
    if isinstance(value, np.random.RandomState):
        kind, keys, *rest = value.get_state(legacy=True)
        return {_NUMPY: (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest)}
    for item in value if isinstance(value, set) else [value]:
        if not isinstance(item, _PLAIN):
            raise TypeError(type(item))
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {_PYTHON}:
        python = random.Random()
        python.setstate(value[_PYTHON])
        return python
    if isinstance(value, dict) and value.keys() == {_NUMPY}:
        kind, keys, *rest = value[_NUMPY]
        generator = np.random.RandomState()
        generator.set_state((kind, np.array(keys.tolist(), np.uint32), *rest))
        return generator
    if isinstance(value, dict):
        return {key: _decoded(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_decoded, value))
    return value
