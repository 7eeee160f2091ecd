"""Finds the ranks that a collective waits for, on every backend.

A rank that has waited for `stall_warn_seconds` reports this to rank 0, which asks all members what they are doing and
logs which ranks are missing for which call. One thread per rank does this, so collectives do not slow down. When a call
fails, its rank asks the members itself, for the error. Another thread answers; see status.py.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from ..types import Settings
from .call import LONGEST_TEXT, Call
from .status import Contact, StatusServer, ask
from .survey import ABSENT, BEHIND, ENDED, INTERRUPTED, LEFT, SILENT, SUSPENDED, WAITING, State, Survey
from .suspension import Suspension

__all__ = ("StallWatch",)

logger = logging.getLogger("dualdist")

_STALLED_SECONDS = 5.0
"""How long to wait for the other ranks' answers when a call has stalled."""
_FAILED_SECONDS = 2.0
"""The same when the backend has failed: an elastic job continues soon."""
_MOST_QUESTIONS = 32
"""How many ranks to ask at a time."""

Key = tuple[str, str | None]
"""`Call.key`: which calls of the members match."""


class _Wait(NamedTuple):
    """The call for which a rank waits on a channel."""

    number: int
    call: Call
    since: float
    pending: Callable[[], Iterable[Call]]
    """Returns the other calls that have begun on the channel."""

    def has(self, key: Key) -> bool:
        """Return whether a call with `key` has begun."""
        return any(call.key == key for call in (self.call, *self.pending()))


class StallWatch:
    """Watches the collectives of one world for missing ranks."""

    def __init__(self, rank: int, size: int, address: str, settings: Settings) -> None:
        self._rank = rank
        self._settings = settings
        self._numbers: dict[str, int] = {}
        """Channel -> how many calls began on it. Equal on all members when they are in step."""
        self._waiting: dict[str, _Wait] = {}
        """By channel."""
        self._given_up: dict[str, _Wait] = {}
        """By channel: calls that stalled. Other members give up at the same time, and their errors show this one."""
        self._interrupted: dict[str, str] = {}
        """Channel -> the error that has ended a call there on this rank alone."""
        self._members: dict[str, tuple[int, ...]] = {}
        """Channel -> its global ranks."""
        self._reported: set[tuple[str, int]] = set()
        """(channel, number) of the calls that this rank has reported."""
        self._due: dict[tuple[str, int, Key], float] = {}
        """(channel, number, key) -> when to ask the members and log; infinite afterwards. Others may be a little late.
        """
        self._crossed: set[str] = set()
        """Channels on which another rank gave up its call while this rank waited for another one."""
        self._notices: dict[str, str] = {}
        """Channel -> what another rank found when it gave up its call."""
        self._partners_notices: dict[str, str] = {}
        """The same from ranks for which this one was not missing: they waited for the same call."""
        self._failures: dict[tuple[str, str], str] = {}
        """(channel, step) -> what another rank was the first to report with `report_failure`."""
        shortest = min(settings.stall_warn_seconds, settings.stall_timeout_seconds)
        self._pause = min(5.0, max(0.02, shortest / 8))
        self._suspension = Suspension(settings.stall_timeout_seconds)
        self._stopping = threading.Event()
        self._server = StatusServer(address, self._answer) if size > 1 else None
        self._contacts: Sequence[Contact] = ()
        self._thread = threading.Thread(target=self._check_repeatedly, name="dualdist-stall", daemon=True)

    @property
    def contact(self) -> Contact | None:
        """Where this rank answers questions; None in a world of one process."""
        return None if self._server is None else self._server.contact

    def start(self, contacts: Sequence[Contact]) -> None:
        """Start watching. contacts: of all ranks of the world."""
        self._contacts = contacts
        if self._server is not None:
            self._thread.start()

    def add_channel(self, channel: str, ranks: tuple[int, ...]) -> None:
        """Add `channel`, whose members have the global ranks `ranks`."""
        self._members[channel] = ranks

    def begin(self, channel: str, call: Call, pending: Callable[[], Iterable[Call]] = tuple) -> int:
        """Start watching `call`, and return its number among the calls of `channel`.

        pending: returns the other calls that have begun on the channel. The members wait for any of them.
        """
        number = self._numbers[channel] = self._numbers.get(channel, 0) + 1
        self._waiting[channel] = _Wait(number, call, time.monotonic(), pending)
        return number

    def end(self, channel: str) -> None:
        """Stop watching the call of `channel`."""
        self._waiting.pop(channel, None)

    def interrupt(self, channel: str, error: str) -> None:
        """Record that `error` ends the call of `channel` on this rank alone."""
        self._interrupted[channel] = error[:LONGEST_TEXT]

    def survey(self, channel: str, number: int, key: Key, *, has_failed: bool = False) -> Survey:
        """Return what the members of `channel` are doing, seen from a call with this number and key.

        has_failed: the backend has failed; otherwise the call has stalled.
        """
        members = self._members[channel]
        seconds = _FAILED_SECONDS if has_failed else _STALLED_SECONDS
        seconds = min(seconds, self._settings.stall_timeout_seconds)
        with ThreadPoolExecutor(min(_MOST_QUESTIONS, len(members)), "dualdist-survey") as pool:
            states = pool.map(lambda rank: self._state(rank, channel, number, key, seconds), members)
            return Survey(dict(zip(members, states, strict=True)), has_failed)

    def give_notice(self, channel: str, survey: Survey) -> None:
        """Let the ranks that answered know that this rank gives up its call on `channel`, and why."""
        if channel in self._waiting:
            self._given_up[channel] = self._waiting[channel]
        notice = ["notice", channel, str(survey), survey.missing]
        for rank in survey.ranks(WAITING, LEFT, ABSENT, BEHIND, SUSPENDED):
            if rank != self._rank:
                self._try_to_ask(rank, notice)

    def notice(self, channel: str) -> str | None:
        """Return what another rank found when it gave up its call on `channel`; None if no rank did."""
        return self._notices.get(channel)

    def partners_notice(self, channel: str) -> str | None:
        """Return what a rank found that waited for the same call of `channel` and gave it up; None if no rank did.

        It may have left the world since then, so that this rank would find that it has ended.
        """
        return self._partners_notices.get(channel)

    def report_failure(self, channel: str, step: str, text: str) -> None:
        """Let `failure(channel, step)` return `text` on the other members of `channel`. Waits a few seconds at most."""
        others = [rank for rank in self._members[channel] if rank != self._rank]
        pool = ThreadPoolExecutor(min(_MOST_QUESTIONS, len(others) or 1), "dualdist-report")
        with pool, contextlib.suppress(RuntimeError):  # the interpreter ends, and the connections with it
            pool.map(lambda rank: self._try_to_ask(rank, ["failure", channel, step, text]), others)

    def failure(self, channel: str, step: str) -> str | None:
        """Return what another member of `channel` was the first to report about `step`; None if nothing."""
        return self._failures.get((channel, step))

    def is_crossed(self, channel: str) -> bool:
        """Return whether another rank gave up its call on `channel` while this rank waited for another call there."""
        return channel in self._crossed

    def close(self) -> None:
        """End the watch."""
        self._stopping.set()
        if self._server is not None:
            self._server.close()
        if self._thread.is_alive():
            self._thread.join(_STALLED_SECONDS)

    def abandon(self) -> None:
        """In a forked process, close its descriptors. Local."""
        if self._server is not None:
            self._server.abandon()

    def _state(self, rank: int, channel: str, number: int, key: Key, seconds: float) -> State:
        try:
            own = rank == self._rank
            began, has_key, call, elsewhere, interrupted, suspended = (
                self._position(channel, key)
                if own
                else ask(self._contacts[rank], ["position", channel, key], seconds)
            )
        except ConnectionError:
            return State(ENDED)
        except OSError:
            return State(SILENT)
        if interrupted is not None:
            return State(INTERRUPTED, interrupted)
        has_left = began > number or (began == number and not call)
        if has_left:
            return State(LEFT, call or elsewhere)
        if suspended is not None:
            return State(SUSPENDED, call or elsewhere, suspended)
        if began == number and has_key:
            return State(WAITING, call)
        return State(BEHIND, call) if call else State(ABSENT, elsewhere)

    def _try_to_ask(self, rank: int, question: Any) -> None:
        with contextlib.suppress(OSError):
            ask(self._contacts[rank], question, _FAILED_SECONDS)

    def _answer(self, question: Any) -> Any:
        about, channel, *rest = question
        if about == "report":
            number, (kind, name) = rest
            self._make_due(channel, number, (kind, name))
        elif about == "notice":
            self._notices[channel], missing = rest
            if self._rank not in missing:
                self._partners_notices[channel] = self._notices[channel]
            elif channel in self._waiting:
                self._crossed.add(channel)
        elif about == "failure":
            step, text = rest
            self._failures.setdefault((channel, step), text)  # a later one may be a consequence
        elif about == "position":
            ((kind, name),) = rest
            return self._position(channel, (kind, name))
        return None

    def _position(self, channel: str, key: Key) -> tuple[int, bool, str, str, str | None, float | None]:
        """Return how many calls began on `channel`, whether one with `key` waits, a call there, and one elsewhere.

        Then follow the error that has ended a call on `channel` on this rank alone, and for how many seconds this
        process has not run recently; None without one.
        """
        waits = dict(self._waiting)
        here = waits.pop(channel, self._given_up.get(channel))
        elsewhere = (f"{wait.call.brief} of process {name.split(',')[0]}" for name, wait in waits.items())
        number, call = self._numbers.get(channel, 0), "" if here is None else here.call.brief
        has_key = here is not None and here.has(key)
        interrupted, suspended = self._interrupted.get(channel), self._suspension.recent
        return number, has_key, call, next(elsewhere, ""), interrupted, suspended

    def _check_repeatedly(self) -> None:
        while not self._ends_after_pause():
            self._report()
            self._log()

    def _ends_after_pause(self) -> bool:
        """Wait for one pause. Return whether the watch has ended meanwhile."""
        self._suspension.expect_tick(self._pause)
        ends = self._stopping.wait(self._pause)
        self._suspension.tick()
        return ends

    def _report(self) -> None:
        """Report to rank 0 which calls have waited too long. If it does not answer, this rank logs them itself."""
        for channel, (number, call, since, _) in list(self._waiting.items()):
            too_long = time.monotonic() - since >= self._settings.stall_warn_seconds
            if not too_long or (channel, number) in self._reported:
                continue
            self._reported.add((channel, number))
            if self._rank != 0:
                with contextlib.suppress(OSError):
                    ask(self._contacts[0], ["report", channel, number, call.key], _FAILED_SECONDS)
                    continue
            self._make_due(channel, number, call.key)

    def _make_due(self, channel: str, number: int, key: Key) -> None:
        self._due.setdefault((channel, number, key), time.monotonic() + 2 * self._pause)

    def _log(self) -> None:
        now = time.monotonic()
        for key in [key for key, due in list(self._due.items()) if due <= now]:
            self._due[key] = math.inf
            survey = self.survey(*key)
            waiting = survey.ranks(WAITING)
            # Without a missing rank, the late one has arrived since the report.
            if not waiting or not survey.missing or self._rank not in (0, waiting[0]):
                continue
            logger.warning(
                "Stalled for %g s: ranks %s wait in %s; missing ranks: %s.",
                self._settings.stall_warn_seconds,
                waiting,
                survey.states[waiting[0]].call,
                survey.missing,
            )
