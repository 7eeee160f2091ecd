"""Rules for the threads that make calls, the guard in which a channel runs them, and what others see of them.

A thread makes one call at a time (`in_turn`). Which threads wait shows whether this rank can make another call
(`is_blocked`). The Guard lets the observer see a call, and stops the channel when the backend fails. Other parts of
the package observe calls: they override methods of Observer and Observation. The core does without them
(dualdist/observation has them). A call that fails then raises the same error, which knows less of what the other ranks
do.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import torch

from ...errors import HorovodInternalError, StallError, logger
from ..backends.base import Work
from ..checks import add_note, shown_ranks
from .call import Call, Record
from .connections import Connections

T = TypeVar("T")
P = ParamSpec("P")

Pending = Callable[[], Iterable[Call]]
"""Returns the calls that this rank has made on a channel, and that have not ended."""


class Observer:
    """Sees the calls of one channel. Its methods run in the thread of the call, and delay it. This one ignores them."""

    def called(self, record: Record) -> None:
        """The script has made a call."""

    def begun(self, call: Call) -> None:
        """A thread begins a step of `call`, in which it may wait for the other members."""

    def agreeing(self, call: Call) -> bool:
        """The members begin to agree on `call`. Return whether `agreed` needs the `arrivals`."""
        return False

    def agreed(self, call: Call | None, record: Record | None, arrivals: Sequence[int]) -> None:
        """The members have agreed about a call, and send its data now.

        call: what they run; None if it raises. record: of this rank's call; None if it has made none, because it has
        joined. arrivals: as in Verdict; may be empty.
        """

    def sent(self, work: Work, name: str, params: Iterable[str], bucket: torch.Tensor) -> Work:
        """A bucket of gradients, with those of `params`, is being sent. Return `work`, which may be wrapped."""
        return work

    def ended(self) -> None:
        """The step that `begun` has announced has ended, or raised."""

    def interrupted(self, error: BaseException) -> None:
        """`error` ends the step on this rank alone. The channel can run no other call."""

    def waited(self, record: Record, since: int) -> None:
        """The script has waited for a call. since: from when on, in nanoseconds, if not from the call on; else 0."""

    def waited_for_data(self, since: int) -> None:
        """The script has waited for data that is sent outside of calls, from `since` on."""

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Report the time in the `with` block to `waited_for_data`."""
        since = time.time_ns()
        try:
            yield
        finally:
            self.waited_for_data(since)

    def note(self, why: str) -> Callable[[], str]:
        """Begin to keep what this rank does, because a call has failed. Return a function that returns what to say."""
        return str

    def explain(
        self, call: Call, error: HorovodInternalError, succeeded: Sequence[int], stop: Callable[[], None]
    ) -> tuple[str, HorovodInternalError] | None:
        """Return why no call can run any more after `error`, and the error that `call` raises. None: unknown.

        succeeded: global ranks that have left the world, but not because of an exception. stop: ends the collectives in
        progress, and lets the other members notice the failure. Call it once, unless the result is None.
        """
        return None

    def cause(self) -> str:
        """Return the ranks that have ended first, and tell the others."""
        return ""

    def others_gave_up(self) -> bool:
        """Return whether another member has said that it gives up a call, and with it all later ones."""
        return False

    failures: Mapping[str, str] = MappingProxyType({})
    """Step -> what another rank was the first to report with `report_failure`."""

    def report_failure(self, step: str, text: str) -> None:
        """Let `failures[step]` be `text` on the other members. Waits a few seconds at most."""


class Observation:
    """Makes the observers of one world. This one makes some that ignore the calls."""

    contact: Any = None
    """What `start` gets of this rank, in types of JSON."""

    def observer(self, name: str, ranks: tuple[int, ...], pending: Pending | None) -> Observer:
        """Return that of the channel `name`, of these global ranks.

        pending: None for calls without agreements, such as those that send gradients.
        """
        return Observer()

    def start(self, contacts: Sequence[Any]) -> None:
        """All ranks have met. contacts: of each. Local."""

    def leave(self) -> None:
        """This rank is about to leave the world: the other ranks notice it. Local."""

    def close(self) -> None:
        """It has made its last call. Local."""

    def abandon(self) -> None:
        """In a forked process, release what it shares with the parent. Local."""


GAVE_UP = "a call failed or stalled"
"""Why an observer writes a note."""


class _CallingThread:
    """A thread that has made a call."""

    def __init__(self) -> None:
        self.call: Call | None = None
        """The call that it is making."""
        self.request: object | None = None
        """The request for which it waits."""
        _calling_threads[threading.current_thread()] = self


class _ThisThread(threading.local):
    def __init__(self) -> None:
        self.state = _CallingThread()


_calling_threads: weakref.WeakKeyDictionary[threading.Thread, _CallingThread] = weakref.WeakKeyDictionary()
_this_thread = _ThisThread()


def run_calls_of_others() -> None:
    """Let this thread not count as one that makes calls: it only runs those of other threads."""
    _this_thread.state = _CallingThread()  # in no list, so that `is_blocked` does not look at it
    del _calling_threads[threading.current_thread()]


def in_turn(call: Call, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return `step(*args, **kwargs)`, which makes `call`. Raises RuntimeError if this thread is in another call.

    A signal handler runs inside the call that it interrupts: this one and a second one would wait for each other.
    """
    thread = _this_thread.state
    interrupted = thread.call
    if interrupted is not None:
        raise RuntimeError(
            f"{call.kind} must not be called in a signal handler or destructor that interrupts {interrupted} at "
            f"{interrupted.where}: each would wait for the other. Let the handler set a flag, and check it after each "
            "step. CheckpointManager(signals=) saves a checkpoint and ends the run in this way."
        )
    try:
        thread.call = call  # inside `try`: a handler that raises may run before any instruction
        return step(*args, **kwargs)
    finally:
        thread.call = None


# Which threads of the script wait for a call, and whether any of them could make another one.
#
# A rank is blocked when no thread of its script can make another call until a pending one ends. When all ranks are
# blocked and no call is pending on all of them, no call can ever run.


@contextlib.contextmanager
def waiting_for(request: object) -> Iterator[None]:
    """In the `with` block, also inside another such block, this thread waits for `request`."""
    thread = _this_thread.state
    former, thread.request = thread.request, request
    try:
        yield
    finally:
        thread.request = former


def awaited() -> frozenset[object]:
    """Return the requests for which threads wait."""
    found = (_calling_threads.get(thread) for thread in threading.enumerate())
    return frozenset(known.request for known in found if known is not None and known.request is not None)


def is_blocked(pending: Collection[object]) -> bool:
    """Return whether each thread that could make another call waits for a request in `pending`.

    These are the main thread, each thread that has made a call, and each that runs a function of the script. A thread
    of a library, such as an idle thread of a pool, is assumed to make no call before its first one. A thread that C++
    has started runs hooks of a backward, as on GPUs. The main thread waits for it.
    """
    threads = {thread: _calling_threads.get(thread) for thread in threading.enumerate()}
    waiting = {thread for thread, known in threads.items() if known is not None and known.request in pending}
    in_backward = any(_is_native(thread) for thread in waiting)
    for thread in threads.keys() - waiting:
        if thread is threading.main_thread():
            if not in_backward:
                return False
        elif not _is_native(thread) and (threads[thread] is not None or _runs_script(thread)):
            return False
    return True


def _is_native(thread: threading.Thread) -> bool:
    """Return whether a library in C++ has started the thread, as autograd does for each GPU."""
    return isinstance(thread, threading._DummyThread)


def _runs_script(thread: threading.Thread) -> bool:
    function = getattr(thread, "_target", None) or type(thread)
    function = getattr(function, "func", function)  # of functools.partial
    module = getattr(function, "__module__", None) or "builtins"
    if module.partition(".")[0] in (__package__.partition(".")[0], *sys.stdlib_module_names):
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


class OutOfStepError(HorovodInternalError):
    """What the members have agreed on shows that they cannot go on together. No process has died.

    Members that have not called `join` all raise it.
    """


class Guard:
    """Observes the calls of one channel, and stops the channel when the backend fails."""

    def __init__(self, connections: Connections, abort: Callable[[], None]) -> None:
        """abort: ends the collectives in progress after a failure, once the other members can notice it."""
        self._abort = abort
        self._connections = connections
        self._broken: str | None = None
        """Why no call can run any more; None while calls can run."""
        self._last: Call | None = None
        """The last call that has begun."""
        self._lost: object = None
        """What `check_peers` has found: True, or a collective that waits for a rank that has left; None: nothing."""
        self._finding_cause = threading.Lock()
        """Held while `check_peers` asks the other ranks: the script goes on at once."""

    def check_peers(self, observer: Observer, unfinished: Callable[[], object] = lambda: None) -> None:
        """If a peer has died or failed, end the collectives in progress and let every later call raise. Local.

        The host may wait for its device, and that for a peer. It must be gone in two checks: a call can raise first,
        and a rank that fails gives its last collectives 5 s to end. A rank that is no peer is known by what others say.
        One that has left without an error may have ended its part, unless the same collective waits in both checks.

        unfinished: returns the last collective that the host does not wait for, None if it has ended.
        """
        before, self._lost = self._lost, None
        if observer.others_gave_up() or self._connections.has_failed_peer():
            self._lost = True
        elif self._connections.peers_that_succeeded():
            self._lost = unfinished()
        is_lost = before is not None and self._lost in (True, before)
        if self._broken is None and self._last is not None and is_lost:
            note = observer.note(GAVE_UP)
            with self._finding_cause:
                failure = self._failure(observer, self._last, HorovodInternalError("a rank has ended"))
            logger.error("%s %s", failure, note())

    def give_up(self) -> None:
        """Let every later call raise, because another channel has failed. Local."""
        self._broken = self._broken or "a call of another process set failed."
        self._connections.close()  # so that no member waits for this rank

    def run(self, observer: Observer, call: Call, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `step(*args, **kwargs)`, observed. Members must run the same steps on the same channel.

        After a failure of the backend, every later call raises.
        """
        if self._broken is not None:
            with self._finding_cause:
                raise HorovodInternalError(
                    f"{call.kind} cannot run: {self._broken} Call shutdown() and init() to continue."
                )
        self._last = call
        observer.begun(call)
        try:
            return step(*args, **kwargs)
        except HorovodInternalError as error:
            if self._broken is not None:  # a step inside this one has failed
                raise
            note = observer.note(GAVE_UP)
            failure = self._failure(observer, call, error)
            add_note(failure, note())
            raise failure from error.__cause__ or error
        except BaseException as error:  # such as KeyboardInterrupt: it is unknown how far this rank got
            if self._broken is not None:
                raise
            observer.interrupted(error)
            self._stop(f"{call.brief} was interrupted: {error!r}.")
            raise
        finally:
            observer.ended()

    def _stop(self, why: str) -> None:
        self._broken = why
        self._connections.close()  # so that no member waits for this rank
        self._abort()

    def _failure(self, observer: Observer, call: Call, error: HorovodInternalError) -> HorovodInternalError:
        """Let every later call raise, and return the error of this one."""
        failed = f"{call.brief} failed: {str(error).rstrip('.')}."
        lost, succeeded = self._connections.lost_peers(), self._connections.peers_that_succeeded()
        stop = functools.partial(self._stop, failed)
        if isinstance(error, OutOfStepError):
            stop()
            return HorovodInternalError(failed)
        if (explained := observer.explain(call, error, succeeded, stop)) is not None:
            self._broken, failure = explained
            return failure
        stop()
        if isinstance(error, StallError):
            self._broken = f"{call.brief} stalled: another rank did not make this call in time."
            return StallError(self._broken)
        gone = f"{shown_ranks(lost).capitalize()} ended, or gave up a call. " if lost else ""
        return HorovodInternalError(
            f"{failed} {gone}Look for the first error of another rank, or for a failure of the network."
        )
