"""Runs the collectives of one process set, matched by kind and name.

For each call the members first agree to make it, and then send its data. They run the calls in the same order. While
each rank's oldest pending call is the same, one exchange of digests suffices (`agree`). Otherwise the members
exchange all their pending calls, and each computes from them what runs and what raises (`match`, the same on all).
Where nothing matches yet, they wait for each other's news. A rank is blocked if no thread of its script can make
another call until a pending one has ended: if all are, nothing will match, which is an error.

A Request holds a call until it has ended. One thread at a time, which holds `_running`, runs the pending ones in
rounds: the caller's own thread if nothing else is pending, else a worker thread. News wakes it. Calls on a device may
run ahead, without an agreement: dualdist/devices/ahead.py.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from ...errors import CollectiveMismatchError, StallError
from .. import accelerator, extension
from ..backends.base import Group
from ..checks import add_note, text_of
from .call import Call, Data, Kind, Record, call_site, no_data
from .connections import ACTIVE, FAILED, JOINED, Connections, Execute, PendingCall, Verdict, agree
from .guard import Guard, Observer, Pending, awaited, in_turn, is_blocked, run_calls_of_others, waiting_for
from .matching import Match, Standing, match

T = TypeVar("T")
P = ParamSpec("P")
JOIN = Kind("join", "JOIN", Data.NONE)
Observe = Callable[[str, tuple[int, ...], Pending | None], Observer]
"""`Observation.observer`."""

# A call of this rank until it has ended.

_WAIT_SECONDS = 0.5
"""How long a thread waits at a time. A signal may not interrupt a wait: its handler then runs after it."""


class Request(Generic[T]):
    """A call of this rank, and its result.

    Python may run a signal handler after any instruction of the main thread. `concurrent.futures.Future` holds a lock
    during some of them. A handler that runs there, and waits for a later call, then stops the thread that runs both
    calls. Here a handler never needs a lock that its thread holds.
    """

    def __init__(self, state: int, call: Call, execute: Execute[T] | None = None, error: str = "") -> None:
        """Make the request.

        state: ACTIVE, JOINED or FAILED, see connections.py. execute: None for a call that only takes part in the
        agreements. error: for FAILED: what this rank raised.
        """
        self.state, self.call, self.execute = state, call, execute
        self.issued = time.time_ns()
        self.record = Record(call, self.issued)
        self.ended = False
        """Whether `get` would return at once."""
        self.on_wait: Callable[[], None] = lambda: None
        """Called when a thread begins to wait for the result: the others must learn that this rank may be blocked."""
        self.on_waited: Callable[[Record, int], None] = lambda record, since: None
        """Called when a thread has waited for the result."""
        self._failure_text = error
        self._value: Any = None
        self._error: BaseException | None = None
        self._unended = threading.Lock()
        """A gate: held until the request has ended. Each thread that waits passes it on to the next."""
        self._unended.acquire()

    @functools.cached_property
    def listed(self) -> PendingCall:
        """What other members see of it in a list of pending calls: without its data."""
        return PendingCall(self.state, replace(self.call, payload=b""), self._failure_text, self.issued)

    def end(self, value: T | None = None, error: BaseException | None = None) -> None:
        """Let `get` return `value` or raise `error`, unless the result is there already."""
        if not self.ended:
            self._value, self._error = value, error
            self.execute = None  # it may hold tensors
            self.record.ended = time.time_ns()
            self.ended = True
            self._unended.release()

    def get(self) -> T:
        """Wait for the result, and return it or raise its exception."""
        if not self.ended:
            since = time.time_ns()
            with waiting_for(self):
                self.on_wait()
                while not self._unended.acquire(timeout=_WAIT_SECONDS):
                    pass
                self._unended.release()
            self.on_waited(self.record, since)
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]


# Wakes the thread that runs a channel when the script makes a call or begins to wait for one.


class News:
    """A wake-up signal between threads that can be waited for together with sockets."""

    def __init__(self) -> None:
        self._pair: tuple[socket.socket, socket.socket] | None = None
        """The reading and the writing end; made when a thread first waits."""
        self._listening = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[socket.socket]:
        """Yield a socket that becomes readable after `give`. Only one thread at a time may listen."""
        if self._pair is None:
            self._pair = socket.socketpair()
            for end in self._pair:
                end.setblocking(False)
        self._listening = True
        try:
            yield self._pair[0]
        finally:
            self._listening = False

    def give(self) -> None:
        """Wake the thread that listens, if one does."""
        if self._listening and self._pair is not None:
            with contextlib.suppress(OSError):  # full: the thread wakes anyway
                self._pair[1].send(b"\0")

    def clear(self) -> None:
        """Forget the signals until now."""
        if self._pair is not None:
            with contextlib.suppress(BlockingIOError):
                while self._pair[0].recv(4096):
                    pass

    def close(self) -> None:
        """Free the sockets. Local, also in a forked process."""
        for end in self._pair or ():
            end.close()
        self._pair = None


_LAST_CALLS_SECONDS = 1.0
_LOOK_AGAIN_SECONDS = 0.25
"""While a thread waits for a call: how often to check whether the other threads of the script have ended."""


class Channel:
    """Runs the collectives of one process set, in the same order on all members."""

    def __init__(
        self,
        name: str,
        connections: Connections,
        data: Group,
        gradients: Group,
        observe: Observe,
        abort: Callable[[Channel], None],
        make_ahead: Callable[[], Group] | None = None,
    ) -> None:
        """abort: ends the collectives in progress when this channel has failed."""
        self.group = data
        self.gradients = gradients
        """The group that sends buckets of gradients: without an agreement for each, see core/gradients/reducer.py."""
        self.sent_digest = 0
        """A digest of which buckets this rank has sent, in their order; equal on all members at each reduction. The
        reducer writes it, and sends it as the `count` of its call."""
        self._name = name
        self._connections = connections
        self._running = threading.Lock()
        """Held by the thread that runs calls."""
        self._own: Request[Any] | None = None
        """The call of the thread that holds `_running`; None if it is the worker thread."""
        self._pending: list[Request[Any]] = []
        """In the order in which the calls were made. Only the thread that runs calls removes them."""
        self._named: weakref.WeakValueDictionary[object, Request[Any]] = weakref.WeakValueDictionary()
        """Key of a call with a name -> its newest request."""
        self._news = News()
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """An item for each call that the worker thread may have to run; False ends it."""
        self._starting = threading.Lock()
        self._worker: threading.Thread | None = None
        self._joined: frozenset[int] = frozenset()
        """Places (indices in the process set) of the members that had joined at the last agreement."""
        for group in (data, gradients):
            group.has_lost_member = connections.has_lost_peer
        self._guard = Guard(connections, functools.partial(abort, self))
        # Without `self`: observers outlive the channel of a removed process set, and groups are freed early.
        pending = self._pending
        self.observer = observe(name, data.ranks, lambda: [request.call for request in list(pending)])
        data.find_cause = self.observer.cause
        self.gradient_observer = observe(f"{name}, gradients", data.ranks, None)
        """Of the exchange over `gradients`."""
        self.ahead: Any = None
        """Runs calls ahead of the device (devices/ahead.py); None where each call has an agreement."""
        self.through_host: Any = None
        """Sends gradients of a device through the host (devices/through_host.py), once some must be."""
        self._groups = [data, gradients]
        if make_ahead is not None and (run_ahead := extension("run_ahead")) is not None:
            guard = functools.partial(self._guard.run, observe(f"{name}, ahead", data.ranks, None))
            self.ahead = run_ahead(self.run, guard, make_ahead)
            self._groups.append(self.ahead)

    @property
    def num_joined(self) -> int:
        """How many members had joined at the last agreement."""
        return len(self._joined)

    def is_outstanding(self, call: Call) -> bool:
        """Return whether an asynchronous call with the kind and name of `call`, which has a name, is not finished."""
        request = self._named.get(call.key)
        return request is not None and not request.ended

    def run(self, call: Call, execute: Execute[T]) -> T:
        """Run `call` and return what `execute` returns. Collective over the process set.

        Raises CollectiveMismatchError when the members' arguments differ, or when all wait for different calls;
        StallError when a member does not make the call in time, HorovodInternalError when the backend failed. This
        method, `submit`, `fail` and `join` raise RuntimeError in a signal handler that has interrupted one of them.
        """
        return in_turn(call, self._run_or_enqueue, Request(ACTIVE, call, execute))

    def submit(self, call: Call, execute: Execute[T]) -> Request[T]:
        """Queue `call` and return at once."""
        return in_turn(call, self._enqueue, Request(ACTIVE, call, execute))

    def fail(self, kind: Kind, error: Exception) -> None:
        """Report to the other members that this rank could not make its call. Does not wait for them."""
        request: Request[None] = Request(FAILED, Call(kind, site=call_site()), error=text_of(error))
        in_turn(request.call, self._enqueue, request)

    def join(self) -> int:
        """Take part in the other members' collectives until all have joined; return the rank that joined last."""
        request: Request[int] = Request(JOINED, Call(JOIN, site=call_site()))
        return in_turn(request.call, lambda: self._enqueue(request).get())

    def receive(self, call: Call, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `step(*args, **kwargs)`, which waits for what the members send over `gradients`.

        Collective over the process set. Raises StallError and HorovodInternalError as `run` does.
        """
        return self._guard.run(self.gradient_observer, call, step, *args, **kwargs)

    def check_peers(self) -> None:
        """End the collectives in progress if a member has died. For devices, from a thread of its own. Local."""
        self._guard.check_peers(self.observer, lambda: self.ahead and self.ahead.unfinished())

    def deadline(self) -> float:
        """Return when a wait that begins now has stalled, on the clock of `time.monotonic`. Local."""
        return self._connections.deadline()

    def leave(self) -> None:
        """End the threads after the pending calls, but wait at most 1 s for each, and close the connections. Local."""
        if self._worker is not None:
            self._wake.put(False)
            self._worker.join(_LAST_CALLS_SECONDS)
        self._connections.say_goodbye()
        self._connections.close()
        self._news.close()
        if self.through_host is not None:
            self.through_host.close(_LAST_CALLS_SECONDS)

    def abort(self, *, has_failed: bool) -> None:
        """End the collectives in progress. If only another channel has failed, every later call raises. Local."""
        if not has_failed:
            self._guard.give_up()
        for group in self._groups:
            group.abort()

    def close(self) -> None:
        """Do what `leave` does, and release the groups. Local."""
        self.leave()
        for group in self._groups:
            group.close()

    def abandon(self) -> None:
        """In a forked process, close its copies of the sockets. The parent's connections stay open. Local."""
        self._connections.abandon()
        self._news.close()

    # Pending calls

    def _enqueue(self, request: Request[T]) -> Request[T]:
        request.on_wait, request.on_waited = self._news.give, self.observer.waited
        if request.call.name is not None:
            self._named[request.call.key] = request
        if self._worker is None:
            self._start_worker()
        self._add(request)
        self._wake.put(True)
        self._news.give()
        return request

    def _start_worker(self) -> None:
        with self._starting:
            if self._worker is None:
                device = accelerator.current_device()
                self._worker = threading.Thread(
                    target=self._work, args=(device,), name=f"dualdist-{self._name}", daemon=True
                )
                self._worker.start()

    def _work(self, device: torch.device | None) -> None:
        """Run calls. device: the current one of the thread that has made the first call; a new thread has the first."""
        if device is not None:
            accelerator.bind(device)
        run_calls_of_others()
        while self._wake.get():
            with self._running:
                while self._pending:
                    self._serve(self._pending[0])

    def _serve(self, oldest: Request[Any]) -> None:
        """Run a round of calls. If it fails, so does the oldest call."""
        try:
            in_turn(oldest.call, self._guard.run, self.observer, oldest.call, self._run_round, oldest)
        except BaseException as error:
            oldest.end(error=error)
            self._forget(oldest)

    def _run_or_enqueue(self, request: Request[T]) -> T:
        """Run `request` in this thread if nothing else is pending, else in the worker thread. Return its result.

        Other threads may add calls meanwhile. Those that match first run in this thread, too.
        """
        if self._pending or not self._running.acquire(blocking=False):
            return self._enqueue(request).get()
        try:
            self._add(request)
            self._own = request
            while not request.ended:
                oldest = self._pending[0]
                self._guard.run(self.observer, oldest.call, self._run_round, oldest)
        except BaseException:
            self._forget(request)
            raise
        finally:
            self._own = None
            self._running.release()
        self.observer.waited(request.record, 0)
        return request.get()

    def _add(self, request: Request[Any]) -> None:
        self.observer.called(request.record)
        self._pending.append(request)

    def _forget(self, request: Request[Any]) -> None:
        request.record.ended = time.time_ns()
        if request in self._pending:
            self._pending.remove(request)

    # A round: an agreement, and the calls that run after it. The caller holds `_running`, in the guard.

    def _run_round(self, oldest: Request[Any]) -> None:
        """Run the oldest call if it is the oldest one of all members, else the pending calls that match."""
        call = oldest.call
        needs_times = self.observer.agreeing(call)
        verdict = agree(self._connections, oldest.state, call, oldest.issued, needs_times=needs_times)
        if verdict.call is None:
            with waiting_for(self._own):  # this thread runs calls, but its script waits for its own one
                requests, found = self._find_match()
            self._end_matched(requests, found, oldest)
            return
        self._joined = frozenset()
        self.observer.agreed(call, oldest.record, verdict.arrivals)
        assert oldest.execute is not None  # a verdict with a call: the oldest requests of all are ACTIVE
        try:
            oldest.end(oldest.execute(self.group, verdict))
        except BaseException as error:
            if _communicates(call, verdict):  # how much was sent is unknown: the guard stops the channel
                raise
            oldest.end(error=error)
        self._pending.remove(oldest)

    def _execute_matched(self, call: Call, execute: Execute[T] | None, verdict: Verdict) -> T:
        """Execute a call of a match. If the members communicate in it, it has a guard of its own: it may stall."""
        assert execute is not None
        if not _communicates(call, verdict):
            return execute(self.group, verdict)
        return self._guard.run(self.observer, call, execute, self.group, verdict)

    def _find_match(self) -> tuple[list[Request[Any]], Match]:
        """Return this rank's requests, and what the members do about them. Waits until they do something."""
        deadline = self._connections.deadline()
        while True:
            requests, standing = self._standing()
            messages = self._connections.allgather_messages(pickle.dumps(standing))
            found = match([pickle.loads(message) for message in messages], self.group.ranks)
            if found.outcomes or found.is_over:
                self._drain(found, requests)
                return requests, found
            self._wait_for_news(standing, deadline)
            self._connections.alert()

    def _standing(self) -> tuple[list[Request[Any]], Standing]:
        """Return this rank's pending requests, and what it reports about them to the other members."""
        requests, waited_for = list(self._pending), awaited()
        return requests, Standing(
            tuple(request.listed for request in requests),
            frozenset(index for index, request in enumerate(requests) if request in waited_for),
            is_blocked(requests),
        )

    def _wait_for_news(self, known: Standing, deadline: float) -> None:
        """Wait until this rank has a call or is blocked, unlike in `known`, or until a member signals that it has news.

        known: what the members know of this rank.
        """
        with self._news.listening() as signal:
            while self._standing()[1] == known:
                seconds = deadline - time.monotonic()
                if seconds <= 0:
                    raise StallError("A rank sent nothing in time.")
                if known.awaited and not known.blocked:
                    seconds = min(seconds, _LOOK_AGAIN_SECONDS)
                if self._connections.wait_for_peers(signal, seconds):
                    return
                self._news.clear()

    def _drain(self, found: Match, requests: list[Request[Any]]) -> None:
        """Receive the data of calls that raise on other members. Those of this rank are received where they raise."""
        own = {request.call.identity for request in requests}
        for call in found.drained:
            if call.identity not in own:
                call.stand_in(self.group, Verdict(None, found.joined))

    def _end_matched(self, requests: list[Request[Any]], found: Match, oldest: Request[Any]) -> None:
        """End the calls about which the members have agreed. requests: this rank's."""
        before, self._joined = self._joined, found.joined
        if self.ahead is not None and any(outcome.verdict.steps_differ for outcome in found.outcomes):
            self.ahead.forget()  # on all members, also on those that do not raise
        raises = any(self.group.rank in outcome.verdict.raising for outcome in found.outcomes)
        note = self.observer.note("a call did not match on all ranks")() if raises else ""
        for outcome in found.outcomes:
            index, verdict = outcome.entries[self.group.rank], outcome.verdict
            request = None if index is None else requests[index]
            self.observer.agreed(verdict.call, None if request is None else request.record, verdict.arrivals)
            if request is None:
                if verdict.call is not None:  # this rank has joined
                    self._execute_matched(verdict.call, verdict.call.stand_in, verdict)
                continue
            if self.group.rank in verdict.raising:
                error = CollectiveMismatchError(verdict.error)
                add_note(error, note)
                request.end(error=error)
            elif verdict.call is None:  # this rank has failed in the call
                request.end()
            else:
                try:
                    request.end(self._execute_matched(verdict.call, request.execute, verdict))
                except BaseException as error:  # other calls can still run
                    request.end(error=error)
            self._pending.remove(request)
        if found.is_over:
            self._joined = frozenset()
            last = self.group.ranks[max(found.joined - before)]
            for request in requests:
                if request.state == JOINED:
                    request.end(last)
                    self._pending.remove(request)


def _communicates(call: Call, verdict: Verdict) -> bool:
    """Return whether the members communicate in `call` after they have agreed on it."""
    if call.kind.data is Data.AFTER and any(verdict.payloads):
        return False
    return call.kind.stand_in is not no_data  # a barrier needs only the agreement
