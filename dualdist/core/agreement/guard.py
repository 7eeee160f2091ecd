"""Rules for the threads that make calls, and the guard in which a channel runs them.

A thread makes one call at a time (`in_turn`). Which threads wait shows whether this rank can make another call
(`is_blocked`). The Guard watches a call for a stall, and stops the channel when the backend fails.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import ParamSpec, TypeVar

from ...errors import HorovodInternalError, StallError, logger
from ..checks import add_note, shown_ranks
from .call import Call
from .connections import Connections
from .watch import GAVE_UP, WatchedChannel

T = TypeVar("T")
P = ParamSpec("P")


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
    """Watches the calls of one channel for a stall, and stops the channel when the backend fails."""

    def __init__(self, connections: Connections, abort: Callable[[], None]) -> None:
        """abort: ends the collectives in progress after a failure, once the other members can notice it."""
        self._abort = abort
        self._connections = connections
        self._broken: str | None = None
        """Why no call can run any more; None while calls can run."""
        self._has_lost_peer = False
        """What `check_peers` has found."""
        self._finding_cause = threading.Lock()
        """Held while `check_peers` asks the other ranks: the script goes on at once."""

    def check_peers(self, watched: WatchedChannel) -> None:
        """If a peer has died, end the collectives in progress and let every later call raise. Local.

        The host may wait for its device, and that for a peer. It must be lost in two checks: a call can raise first.
        """
        had_lost, self._has_lost_peer = self._has_lost_peer, self._connections.has_lost_peer()
        call = watched.last_call
        if self._broken is None and call is not None and had_lost and self._has_lost_peer:
            dump = watched.dump(GAVE_UP)
            with self._finding_cause:
                failure = self._failure(watched, call, HorovodInternalError("a rank has ended"))
            logger.error("%s %s", failure, dump())

    def give_up(self) -> None:
        """Let every later call raise, because another channel has failed. Local."""
        self._broken = self._broken or "a call of another process set failed."
        self._connections.close()  # so that no member waits for this rank

    def run(
        self, watched: WatchedChannel, call: Call, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return `step(*args, **kwargs)`, watched for a stall. Members must run the same steps on the same channel.

        After a failure of the backend, every later call raises.
        """
        if self._broken is not None:
            with self._finding_cause:
                raise HorovodInternalError(
                    f"{call.kind} cannot run: {self._broken} Call shutdown() and init() to continue."
                )
        watched.begin(call)
        try:
            return step(*args, **kwargs)
        except HorovodInternalError as error:
            if self._broken is not None:  # a step inside this one has failed
                raise
            dump = watched.dump(GAVE_UP)
            failure = self._failure(watched, call, error)
            add_note(failure, dump())
            raise failure from error.__cause__ or error
        except BaseException as error:  # such as KeyboardInterrupt: it is unknown how far this rank got
            if self._broken is not None:
                raise
            self._broken = f"{call.brief} was interrupted: {error!r}."
            watched.interrupt(repr(error))
            self._connections.close()
            self._abort()
            raise
        finally:
            watched.end()

    def _failure(
        self, watched: WatchedChannel, call: Call, error: HorovodInternalError
    ) -> HorovodInternalError:
        """Let every later call raise, and return the error of this one, which says what the other ranks are doing."""
        if isinstance(error, OutOfStepError):
            self._connections.close()
            self._abort()
            self._broken = f"{call.brief} failed: {error}."
            return HorovodInternalError(self._broken)
        found, succeeded = None, self._connections.peers_that_succeeded()
        if isinstance(error, StallError) or watched.is_crossed:
            found = watched.give_up()
        self._connections.close()  # so that no member waits for this rank
        self._abort()
        found = found or watched.notice
        if found is not None:
            stalled = f"{call.brief} stalled; {found}"
            self._broken = stalled.splitlines()[0]
            return StallError(stalled)
        self._broken = f"{call.brief} failed: {str(error).rstrip('.')}."
        survey = watched.fail(succeeded)
        if not survey.missing or watched.failures:  # another rank has said why before it ended
            return HorovodInternalError(
                f"{self._broken} Look for the first error of another rank, or for a failure of the network"
                f"{f'; {survey}' if survey.missing else '.'}"
            )
        causes = shown_ranks(survey.missing)
        failed = f"{call.brief} failed: the cause is {causes}"
        self._broken = f"{failed}; {str(survey).splitlines()[0]}"
        advice = "Look for its first error, or for a failure of the network"
        if set(survey.missing) <= set(succeeded):
            advice = (
                f"{causes.capitalize()} ended or called shutdown(), without an exception and without this call. Let "
                "all ranks make the same calls. If one had fewer batches than the others, give all the same number, or "
                "call join() at the end"
            )
        return HorovodInternalError(f"{failed}. {advice}; {survey}")
