"""Runs the collectives of one process set, matched by kind and name.

For each call the members first agree to make it, and then send its data. They run the calls in the same order. While
each rank's oldest pending call is the same, one exchange of digests suffices (verdict.py). Otherwise the members
exchange all their pending calls (matching.py), and wait for each other's news where nothing matches yet.

A synchronous call runs in the caller's thread when nothing else is pending. An asynchronous call, and every call made
while one is pending, runs in one worker thread.
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
from typing import Any, Generic, TypeVar

import torch

from .. import accelerator
from ..backends.base import Group
from ..checks import text_of
from ..errors import CollectiveMismatchError, StallError
from . import call_kinds
from .ahead import Ahead
from .call import Call, call_site
from .call_kinds import Data, Kind, WhenJoined
from .connections import Connections
from .guard import Guard, in_turn
from .matching import Match, Standing, match
from .timeline import Timeline
from .verdict import ACTIVE, FAILED, JOINED, Entry, Verdict, agree
from .watch import StallWatch, awaited, is_blocked, waiting_for

# The result of a call that runs in another thread.

T = TypeVar("T")

_WAIT_SECONDS = 0.5
"""A signal that arrives just before a wait or in another thread does not interrupt it: its handler runs afterwards."""


class Result(Generic[T]):
    """What `compute` returns or raises, once `run` has called it in another thread.

    Python runs signal handlers between any two instructions of the main thread. `concurrent.futures.Future` holds a
    lock in some of them: a handler that waits there for a later call stops the thread that runs both. Here only the
    wait itself holds a lock, for no instruction of Python.
    """

    def __init__(self, compute: Callable[..., T]) -> None:
        self._compute: Callable[..., T] | None = compute
        self._value: T
        self._error: BaseException | None = None
        self._ended = False
        self._running = threading.Lock()
        self._running.acquire()

    def run(self, *arguments: Any) -> None:
        """Compute the result from `arguments`. Never raises."""
        assert self._compute is not None
        try:
            self._value = self._compute(*arguments)
        except BaseException as error:
            self._error = error
        self._end()

    def fail(self, error: BaseException) -> None:
        """Let `get` raise `error`, unless the result is there already."""
        if not self._ended:
            self._error = error
            self._end()

    def _end(self) -> None:
        self._compute = None  # it may hold tensors
        self._ended = True
        self._running.release()

    def done(self) -> bool:
        """Return whether `get` would return at once."""
        return self._ended

    def get(self) -> T:
        """Wait for the result, and return it or raise its exception."""
        while not self._ended:
            if self._running.acquire(timeout=_WAIT_SECONDS):
                self._running.release()
        if self._error is not None:
            raise self._error
        return self._value


# A call of this rank that waits for the other members.


class Request(Result[T]):
    """A pending call and its result."""

    def __init__(self, entry: Entry, compute: Callable[[Any], T], on_wait: Callable[[], None]) -> None:
        """Make the request.

        Args:
            entry: what this rank contributes to the agreements.
            compute: returns the result, from the verdict of the members.
            on_wait: called when a thread begins to wait for the result.
        """
        super().__init__(compute)
        self.entry = entry
        self._issued = time.time_ns()
        self._on_wait = on_wait

    @functools.cached_property
    def listed(self) -> Entry:
        """The entry as other members see it in a list of pending calls: without its data."""
        return self.entry._replace(call=replace(self.entry.call, payload=b""), issued=self._issued)

    @property
    def call(self) -> Call:
        """The call of the entry."""
        return self.entry.call

    def get(self) -> T:
        if self.done():
            return super().get()
        with waiting_for(self):
            self._on_wait()
            return super().get()


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

Execute = Callable[[Group, Verdict], T]
"""Moves the data of a call over the group, after the agreement; returns the result."""
StandIn = Callable[[Call, Group, Verdict], None]
"""What a rank that has called `join` runs when the other ranks call a collective."""


class Channel:
    """Runs the collectives of one process set, in the same order on all members."""

    def __init__(
        self,
        name: str,
        connections: Connections,
        data: Group,
        gradients: Group,
        watch: StallWatch,
        timeline: Timeline,
        stand_in: StandIn,
        make_ahead: Callable[[], Group] | None = None,
    ) -> None:
        self.group = data
        self.gradients = gradients
        """A second group, only for gradients: buckets are sent in their own order; see gradients/reducer.py."""
        self.gradients_sent = 0
        """A digest of which buckets this rank has sent, in their order; equal on all members at each reduction."""
        self._name = name
        self._connections = connections
        self._timeline = timeline
        self._stand_in = stand_in
        self._running = threading.Lock()
        """Held by the thread that runs calls."""
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
        self._watch = watch
        for group in (data, gradients):
            group.has_lost_member = connections.has_lost_peer
        pending = lambda: [request.call for request in list(self._pending)]  # noqa: E731
        self._guard = Guard(watch, connections, pending, self._abort)
        self._gradients_name, ahead_name = f"{name}, gradients", f"{name}, ahead"
        self.ahead = Ahead(ahead_name, self.run, self._guard, make_ahead)
        for watched in (name, self._gradients_name, ahead_name):
            watch.add_channel(watched, data.ranks)

    @property
    def num_joined(self) -> int:
        """How many members had joined at the last agreement."""
        return len(self._joined)

    @property
    def has_joined(self) -> bool:
        """Whether a member had joined at the last agreement."""
        return bool(self._joined)

    def is_outstanding(self, call: Call) -> bool:
        """Return whether an asynchronous call with the kind and name of `call`, which has a name, is not finished."""
        request = self._named.get(call.key)
        return request is not None and not request.done()

    def run(self, call: Call, execute: Execute[T]) -> T:
        """Run `call` and return what `execute` returns. Collective over the process set.

        Raises CollectiveMismatchError when the members' arguments differ, or when all wait for different calls;
        StallError when a member does not make the call in time, HorovodInternalError when the backend failed. This
        method, `submit`, `fail` and `join` raise RuntimeError in a signal handler that has interrupted one of them in
        the same thread.
        """
        try:
            return in_turn(call, self._run, call, execute)
        except CollectiveMismatchError:
            self.ahead.forget()
            raise

    def _run(self, call: Call, execute: Execute[T]) -> T:
        if not self._pending and self._running.acquire(blocking=False):
            try:
                return self._run_here(call, execute)
            finally:
                self._running.release()
        return self._enqueue(Entry(ACTIVE, call), functools.partial(self._perform, call, execute)).get()

    def submit(self, call: Call, execute: Execute[T]) -> Result[T]:
        """Queue `call` and return at once."""
        perform = functools.partial(self._perform, call, execute)
        return in_turn(call, lambda: self._enqueue(Entry(ACTIVE, call), perform))

    def receive(self, call: Call, step: Callable[[], T]) -> T:
        """Return `step()`, which waits for what the members send over `gradients`. Collective over the process set.

        Raises StallError and HorovodInternalError as `run` does.
        """
        return self._guard.run(self._gradients_name, call, step)

    def report_failure(self, step: str, text: str) -> None:
        """Let `failure(step)` return `text` on the other members, which may be waiting. Takes a few seconds at most."""
        self._watch.report_failure(self._gradients_name, step, text)

    def deadline(self) -> float:
        """Return when a wait that begins now has stalled, on the clock of `time.monotonic`. Local."""
        return self._connections.deadline()

    def failure(self, step: str) -> str | None:
        """Return what another member has reported about `step` of the exchange over `gradients`. Local."""
        return self._watch.failure(self._gradients_name, step)

    def fail(self, kind: Kind, error: Exception) -> None:
        """Report to the other members that this rank could not make its call. Does not wait for them."""
        entry = Entry(FAILED, Call(kind, site=call_site()), text_of(error))
        in_turn(entry.call, lambda: self._enqueue(entry, lambda verdict: None))

    def join(self) -> int:
        """Take part in the other members' collectives until all have joined; return the rank that joined last."""
        entry = Entry(JOINED, Call(call_kinds.JOIN, site=call_site()))
        return in_turn(entry.call, lambda: self._enqueue(entry, lambda last: int(last)).get())

    def close(self) -> None:
        """End the worker thread after the pending calls, but wait at most 1 s for it, and close the connections."""
        if self._worker is not None:
            self._wake.put(False)
            self._worker.join(_LAST_CALLS_SECONDS)
        self._connections.say_goodbye()
        for held in (self._connections, self._news, self.group, self.gradients, self.ahead):
            held.close()

    def _abort(self) -> None:
        for group in (self.group, self.gradients, self.ahead):
            group.abort()

    def abandon(self) -> None:
        """In a forked process, close its copies of the sockets. The parent's connections stay open. Local."""
        self._connections.abandon()
        self._news.close()

    # Pending calls

    def _enqueue(self, entry: Entry, compute: Callable[[Any], T]) -> Request[T]:
        request = Request(entry, compute, self._news.give)
        if entry.call.name is not None:
            self._named[entry.call.key] = request
        if self._worker is None:
            self._start_worker()
        self._pending.append(request)
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
        while self._wake.get():
            with self._running:
                while self._pending:
                    self._serve(self._pending[0])

    def _serve(self, oldest: Request[Any]) -> None:
        """Run a round of calls. If it fails, so does the oldest call."""
        try:
            in_turn(oldest.call, lambda: self._run_round(oldest))
        except BaseException as error:
            oldest.fail(error)
            self._forget(oldest)

    def _forget(self, request: Request[Any]) -> None:
        if request in self._pending:
            self._pending.remove(request)

    # Running calls. The caller holds `_running`.

    def _run_here(self, call: Call, execute: Execute[T]) -> T:
        """Run `call` in the thread that made it."""
        verdict = self._agree(Entry(ACTIVE, call))
        if verdict.call is not None:
            return self._perform(call, execute, verdict)
        request = Request(
            Entry(ACTIVE, call), functools.partial(self._perform, call, execute), self._news.give
        )
        self._pending.insert(0, request)
        try:
            with waiting_for(request):
                self._match(request)
                while not request.done():
                    self._run_round(self._pending[0])
        finally:
            self._forget(request)
        return request.get()

    def _run_round(self, oldest: Request[Any]) -> None:
        """Run the oldest call if it is that of all members, else those that match."""
        verdict = self._agree(oldest.entry)
        if verdict.call is None:
            self._match(oldest)
        else:
            oldest.run(verdict)
            self._pending.remove(oldest)

    def _perform(self, call: Call, execute: Execute[T], verdict: Verdict) -> T:
        kind = call.kind
        has_data = kind.when_joined is not WhenJoined.NOTHING
        if not has_data or (kind.data is Data.AFTER and any(verdict.payloads)):
            return self._execute(call, execute, verdict)  # the members exchange nothing more
        return self._guarded(call, functools.partial(self._execute, call, execute, verdict))

    def _execute(self, call: Call, execute: Execute[T], verdict: Verdict) -> T:
        if not self._timeline.is_open:
            return execute(self.group, verdict)
        with self._timeline.operation(self._name, call):
            return execute(self.group, verdict)

    def _guarded(self, call: Call, step: Callable[[], T]) -> T:
        return self._guard.run(self._name, call, step)

    # Agreement

    def _agree(self, entry: Entry) -> Verdict:
        negotiate = self._negotiate if self._timeline.is_open else agree
        step = functools.partial(negotiate, self._connections, entry)
        verdict = self._guard.run(self._name, entry.call, step)
        if verdict.call is not None:
            self._joined = frozenset()
        return verdict

    def _negotiate(self, connections: Connections, entry: Entry) -> Verdict:
        with self._timeline.negotiation(self._name, self.group.ranks, entry.call) as mark_arrivals:
            verdict = agree(connections, entry, needs_times=True)
            mark_arrivals(verdict.arrivals)
        return verdict

    def _match(self, oldest: Request[Any]) -> None:
        """End some pending calls: exchange those of all members until some match or must raise."""
        requests, found = self._guarded(oldest.call, self._find_match)
        before, self._joined = self._joined, found.joined
        if found.drained:
            self._guarded(oldest.call, lambda: self._drain(found, requests))
        for step in found.steps:
            index = step.entries[self.group.rank]
            self._take_part(step.verdict, None if index is None else requests[index], oldest)
        if found.is_over:
            self._joined = frozenset()
            last = self.group.ranks[max(found.joined - before)]
            for request in requests:
                if request.entry.state == JOINED:
                    request.run(last)
                    self._pending.remove(request)

    def _find_match(self) -> tuple[list[Request[Any]], Match]:
        """Return this rank's requests, and what the members do about them. Waits until they do something."""
        deadline = self._connections.deadline()
        while True:
            requests, standing = self._standing()
            messages = self._connections.allgather_messages(pickle.dumps(standing))
            found = match([pickle.loads(message) for message in messages], self.group.ranks)
            if found.steps or found.is_over:
                return requests, found
            self._wait_for_news(standing, deadline)
            self._connections.alert()

    def _standing(self) -> tuple[list[Request[Any]], Standing]:
        requests, waited_for = list(self._pending), awaited()
        return requests, Standing(
            tuple(request.listed for request in requests),
            frozenset(index for index, request in enumerate(requests) if request in waited_for),
            is_blocked(requests),
        )

    def _wait_for_news(self, known: Standing, deadline: float) -> None:
        """Wait until this rank's standing is not as `known` to the members, or until a member has news."""
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
                self._stand_in(call, self.group, Verdict(None, found.joined))

    def _take_part(self, verdict: Verdict, request: Request[Any] | None, oldest: Request[Any]) -> None:
        """Do what the members have agreed about one call. request: this rank's, which ends; None if it has none."""
        if verdict.call is not None and request is not oldest:
            with self._timeline.negotiation(self._name, self.group.ranks, verdict.call) as mark_arrivals:
                mark_arrivals(verdict.arrivals)
        if request is None:
            if verdict.call is not None:
                stand_in = functools.partial(self._stand_in, verdict.call)
                self._perform(verdict.call, stand_in, verdict)
            return
        if self.group.rank in verdict.raising:
            request.fail(CollectiveMismatchError(verdict.error))
        else:
            request.run(verdict)
        self._pending.remove(request)
