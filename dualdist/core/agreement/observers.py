"""What other parts of the package see of the calls of this rank: they override methods of the two classes here.

The core does without them (dualdist/observation has them). A call that fails then raises the same error, which knows
less of what the other ranks do.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from ...errors import HorovodInternalError
from ..backends.base import Work
from .call import Call, Record

T = TypeVar("T")
P = ParamSpec("P")

Pending = Callable[[], Iterable[Call]]
"""Returns the calls that this rank has made on a channel, and that have not ended."""


class Observer:
    """Sees the calls of one channel. Its methods run in the thread of the call, and delay it."""

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

    def note(self, why: str) -> Callable[[], str]:
        """Begin to keep what this rank does, because a call has failed. Return a function that returns what to say."""
        return str

    def explain(
        self, call: Call, error: HorovodInternalError, succeeded: Sequence[int], stop: Callable[[], None]
    ) -> tuple[str, HorovodInternalError]:
        """Return why no call can run any more after `error`, and the error that `call` raises.

        succeeded: global ranks that have left the world, but not because of an exception. stop: ends the collectives in
        progress, and lets the other members notice the failure. Call it once.
        """
        raise NotImplementedError

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


class Observers:
    """The observers of one channel: for each event, the methods of those that override it. Others cost nothing."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        def of(event: Callable[Concatenate[Any, P], T]) -> tuple[Callable[P, T], ...]:
            name = event.__name__
            return tuple([getattr(one, name) for one in observers if getattr(type(one), name) is not event])

        self.all = tuple(observers)
        self.called, self.begun, self.ended = of(Observer.called), of(Observer.begun), of(Observer.ended)
        self.agreeing, self.agreed = of(Observer.agreeing), of(Observer.agreed)
        self.sent, self.interrupted = of(Observer.sent), of(Observer.interrupted)
        self.waited, self.waited_for_data = of(Observer.waited), of(Observer.waited_for_data)
        self.note, self.explain, self.cause = of(Observer.note), of(Observer.explain), of(Observer.cause)
        self.others_gave_up = of(Observer.others_gave_up)

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Report the time in the `with` block as a wait for data."""
        since = time.time_ns()
        try:
            yield
        finally:
            for waited in self.waited_for_data:
                waited(since)

    def notes(self, why: str) -> Callable[[], str]:
        """Return what returns the `note` of all."""
        notes = [note(why) for note in self.note]
        return lambda: "".join([text() for text in notes])


class Observation:
    """Makes the observers of one world. This one makes none."""

    contact: Any = None
    """What `start` gets of this rank, in types of JSON."""

    def observers(self, name: str, ranks: tuple[int, ...], pending: Pending | None) -> Sequence[Observer]:
        """Return those of the channel `name`, of these global ranks.

        pending: None for calls without agreements, such as those that send gradients.
        """
        return ()

    def start(self, contacts: Sequence[Any]) -> None:
        """All ranks have met. contacts: of each. Local."""

    def leave(self) -> None:
        """This rank is about to leave the world: the other ranks notice it. Local."""

    def close(self) -> None:
        """It has made its last call. Local."""

    def abandon(self) -> None:
        """In a forked process, release what it shares with the parent. Local."""
