"""Runs the collectives of one process set in the order of the calls.

In each, the members first agree that they make the same call (verdict.py), and then send its data.

A synchronous call runs in the caller's thread when nothing is queued. An asynchronous call, and every call queued
after it, runs in one worker thread.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ..backends.base import Group
from ..checks import text_of
from ..errors import CollectiveMismatchError, HorovodInternalError, StallError
from . import call_kinds
from .call import Call
from .call_kinds import Kind
from .call_site import call_site
from .connections import Connections
from .result import Result
from .stall import StallWatch
from .timeline import Timeline
from .turn import in_turn
from .verdict import ACTIVE, FAILED, JOINED, Entry, Verdict, agree

__all__ = ("Channel", "Execute", "StandIn")

_LAST_CALLS_SECONDS = 1.0

T = TypeVar("T")
Execute = Callable[[Group, Verdict], T]
"""Moves the data of a call over the group, after the agreement; returns the result."""
StandIn = Callable[[Call, Group, Verdict], None]
"""What a rank that has called `join` runs when the other ranks call a collective."""


class Channel:
    """Runs the collectives of one process set in order."""

    def __init__(
        self,
        name: str,
        connections: Connections,
        data: Group,
        gradients: Group,
        watch: StallWatch,
        timeline: Timeline,
        stand_in: StandIn,
    ) -> None:
        self.group = data
        self.gradients = gradients
        """A second group, only for gradients: buckets are sent in their own order; see gradients/reducer.py."""
        self._name = name
        self._connections = connections
        self._watch = watch
        self._timeline = timeline
        self._stand_in = stand_in
        self._running = threading.Lock()
        """Held by the thread that runs a call."""
        self._queue: queue.SimpleQueue[Result[Any] | None] = queue.SimpleQueue()
        self._queued = 0
        """How many calls are in the queue or in the worker thread."""
        self._counting = threading.Lock()
        self._worker: threading.Thread | None = None
        self._joined: frozenset[int] = frozenset()
        """Places (indices in the process set) of the members that had joined at the last agreement."""
        self._broken: str | None = None
        """Why no call can run any more; None while calls can run."""
        self._gradients_name = f"{name}, gradients"
        for watched in (name, self._gradients_name):
            watch.add_channel(watched, data.ranks)

    @property
    def has_joined(self) -> bool:
        """Whether a member had joined at the last agreement."""
        return bool(self._joined)

    def run(self, call: Call, execute: Execute[T]) -> T:
        """Run `call` and return what `execute` returns. Collective over the process set.

        Raises CollectiveMismatchError when the members made different calls, StallError when a member made no call
        in time, HorovodInternalError when the backend failed. This method, `submit`, `fail` and `join` raise
        RuntimeError in a signal handler that has interrupted one of them in the same thread.
        """
        return in_turn(call, functools.partial(self._run, call, execute))

    def _run(self, call: Call, execute: Execute[T]) -> T:
        if self._queued == 0 and self._running.acquire(blocking=False):
            try:
                return self._perform(call, execute)
            finally:
                self._running.release()
        return self._enqueue(call, functools.partial(self._perform, call, execute)).get()

    def submit(self, call: Call, execute: Execute[T]) -> Result[T]:
        """Queue `call` and return at once."""
        step = functools.partial(self._perform, call, execute)
        return in_turn(call, lambda: self._enqueue(call, step))

    def receive(self, call: Call, step: Callable[[], T]) -> T:
        """Return `step()`, which waits for what the members send over `gradients`. Collective over the process set.

        Raises StallError and HorovodInternalError as `run` does.
        """
        return self._guarded(call, step, self._gradients_name)

    def fail(self, kind: Kind, error: Exception) -> None:
        """Report to the other members that this rank could not make its call. Does not wait for them."""
        entry = Entry(FAILED, Call(kind, site=call_site()), text_of(error))
        in_turn(entry.call, lambda: self._enqueue(entry.call, lambda: self._notify(entry)))

    def join(self) -> int:
        """Take part in the other members' collectives until all have joined; return the rank that joined last."""
        call = Call(call_kinds.JOIN, site=call_site())
        return in_turn(call, lambda: self._enqueue(call, lambda: self._answer(call)).get())

    def close(self) -> None:
        """End the worker thread after the queued calls, but wait at most 1 s for it, and close the connections."""
        if self._worker is not None:
            self._queue.put(None)
            self._worker.join(_LAST_CALLS_SECONDS)
        for held in (self.group, self.gradients, self._connections):
            held.close()

    def abandon(self) -> None:
        """In a forked process, close its copies of the sockets. The parent's connections stay open. Local."""
        self._connections.abandon()

    def _enqueue(self, call: Call, step: Callable[[], T]) -> Result[T]:
        result = Result(lambda: in_turn(call, step))
        with self._counting:
            self._queued += 1
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name=f"dualdist-{self._name}", daemon=True)
                self._worker.start()
            self._queue.put(result)
        return result

    def _work(self) -> None:
        while (result := self._queue.get()) is not None:
            with self._running:
                result.run()
            with self._counting:
                self._queued -= 1
            del result  # the next call may come much later

    def _perform(self, call: Call, execute: Execute[T]) -> T:
        while True:
            verdict = self._agree(Entry(ACTIVE, call))
            if self._connections.rank in verdict.raising:
                raise CollectiveMismatchError(verdict.error)
            if verdict.call is not None:
                return self._guarded(call, functools.partial(self._execute, call, execute, verdict))

    def _answer(self, call: Call) -> int:
        while True:
            before = self._joined
            verdict = self._agree(Entry(JOINED, call))
            if len(verdict.joined) == self.group.size:
                self._joined = frozenset()
                return self.group.ranks[max(verdict.joined - before)]
            if verdict.call is not None:
                stand_in = functools.partial(self._stand_in, verdict.call)
                self._guarded(verdict.call, functools.partial(self._execute, verdict.call, stand_in, verdict))

    def _notify(self, entry: Entry) -> None:
        # If this fails, the channel is broken and its next call raises the error.
        with contextlib.suppress(HorovodInternalError):
            self._agree(entry)

    def _agree(self, entry: Entry) -> Verdict:
        return self._guarded(entry.call, functools.partial(self._negotiate, entry))

    def _negotiate(self, entry: Entry) -> Verdict:
        with self._timeline.negotiation(self._name, self.group.ranks, entry.call) as mark_arrivals:
            verdict = agree(self._connections, entry)
            self._joined = verdict.joined
            mark_arrivals(verdict.arrivals)
        for call in verdict.drained:
            if call.identity != entry.call.identity:
                self._stand_in(call, self.group, verdict)
        return verdict

    def _execute(self, call: Call, execute: Execute[T], verdict: Verdict) -> T:
        with self._timeline.operation(self._name, call):
            return execute(self.group, verdict)

    def _guarded(self, call: Call, step: Callable[[], T], name: str | None = None) -> T:
        """Return `step()`, watched for a stall. After a failure of the backend, every later call raises.

        name: the channel of the watch, by default this one. Members must run the same steps on it.
        """
        if self._broken is not None:
            raise HorovodInternalError(
                f"{call.kind} cannot run: {self._broken} Call shutdown() and init() to continue."
            )
        name = name or self._name
        number = self._watch.begin(name, call)
        try:
            return step()
        except HorovodInternalError as error:
            if self._broken is not None:  # a step inside this one has failed
                raise
            raise self._failure(call, name, number, error) from error.__cause__
        except BaseException as error:  # such as KeyboardInterrupt: it is unknown how far this rank got
            self._broken = f"{call} at {call.where} was interrupted: {error!r}."
            self._connections.close()
            raise
        finally:
            self._watch.end(name)

    def _failure(
        self, call: Call, name: str, number: int, error: HorovodInternalError
    ) -> HorovodInternalError:
        """Let every later call raise, and return the error of this one, which says what the other ranks are doing."""
        found = None
        if isinstance(error, StallError):
            survey = self._watch.survey(name, number)
            self._watch.give_notice(name, survey)
            found = str(survey)
        self._connections.close()  # so that no member waits for this rank
        found = found or self._watch.notice(name)
        if found is not None:
            stalled = f"{call} at {call.where} stalled; {found}"
            self._broken = stalled.splitlines()[0]
            return StallError(stalled)
        self._broken = f"{call} at {call.where} failed: {str(error).rstrip('.')}."
        text = f"{self._broken} Look for the first error of another rank, or for a failure of the network"
        survey = self._watch.survey(name, number, has_failed=True)
        return HorovodInternalError(f"{text}; {survey}" if survey.missing else f"{text}.")
