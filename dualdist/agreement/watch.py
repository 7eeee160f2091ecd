"""Finds the ranks that a collective waits for, on every backend.

A rank that has waited for `stall_warn_seconds` reports this to rank 0, which asks all members what they are doing and
logs which ranks are missing for which call. One thread per rank does this, so collectives do not slow down. When a call
fails, its rank asks the members itself, for the error. Another thread answers; see status.py.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hmac
import json
import logging
import math
import secrets
import select
import socket
import sys
import sysconfig
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from ..types import Settings
from .call import LONGEST_TEXT, Call
from .verdict import shown_ranks

# Notices that no thread of Python could run for a while, as in a process that was stopped (SIGSTOP).


class Suspension:
    """Measures how late the regular ticks of a thread come."""

    def __init__(self, seconds: float) -> None:
        """seconds: how long a suspension lasts at least."""
        self._seconds = seconds
        self._next = math.inf
        self._last, self._ended = 0.0, -math.inf
        """How long the last suspension was, and when it ended."""

    def expect_tick(self, pause: float) -> None:
        """Expect `tick` after `pause` seconds. A suspension before the next `tick` delays it."""
        self._next = time.monotonic() + pause

    def tick(self) -> None:
        """Take note of the delay. Until the next `expect_tick`, none is measured."""
        now = time.monotonic()
        if now - self._next >= self._seconds:
            self._last, self._ended = now - self._next, now
        self._next = math.inf

    @property
    def recent(self) -> float | None:
        """How long the last suspension was, in seconds; None without one, or if it ended some time ago."""
        now = time.monotonic()
        if now - self._next >= self._seconds:  # the thread has not had the time to tick
            return now - self._next
        return self._last if now - self._ended < 2 * self._seconds else None


# Questions between ranks that are answered at any time, such as what a rank is doing.
#
# Every rank answers from a thread that does nothing else, so it does while its other threads wait. A process that has
# ended refuses the connection; one that is stopped, or behind a cut link, does not answer. The store cannot be used for
# this: nobody can read it while the rank that serves it is stopped.

_TOKEN_BYTES = 16
_LONGEST = 1 << 16
"""Bytes of a question or an answer."""
_MOST_CALLERS = 64
"""How many connections are open at a time; for the next one, the oldest is closed."""
_SHORTAGE_SECONDS = 0.1
"""How long the server waits when it cannot accept a connection, for example because too many files are open."""


class Contact(NamedTuple):
    """Where a rank answers questions."""

    host: str
    port: int
    token: str
    """In hexadecimal digits. The server answers only questions that begin with it."""


class StatusServer:
    """Answers questions, on a free port of `address`.

    answer: takes a question and returns the answer, both as values of JSON. It must return at once.
    """

    def __init__(self, address: str, answer: Callable[[Any], Any]) -> None:
        self._answer = answer
        self._listener = socket.create_server((address, 0), backlog=1024)
        self._listener.setblocking(False)
        token = secrets.token_hex(_TOKEN_BYTES)
        self.contact = Contact(address, self._listener.getsockname()[1], token)
        self._callers: dict[int, tuple[socket.socket, bytearray]] = {}
        """The open connections by descriptor, the oldest first, with what each has sent."""
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="dualdist-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering: from now on, connections are refused."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()

    def abandon(self) -> None:
        """In a forked process, close its descriptor of the port. The parent continues to answer."""
        self._listener.close()

    def _serve(self) -> None:
        while not self._closing:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._callers:
                    self._read(descriptor)
                elif descriptor == self._listener.fileno():
                    self._accept()
        for descriptor in list(self._callers):
            self._forget(descriptor)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            if not self._closing:
                time.sleep(_SHORTAGE_SECONDS)
            return
        connection.setblocking(False)
        if len(self._callers) == _MOST_CALLERS:
            self._forget(next(iter(self._callers)))
        self._callers[connection.fileno()] = connection, bytearray()
        self._poll.register(connection, select.POLLIN)

    def _read(self, descriptor: int) -> None:
        connection, read = self._callers[descriptor]
        part = b""
        with contextlib.suppress(OSError):
            part = connection.recv(_LONGEST)
        read += part
        if part and not read.endswith(b"\n") and len(read) < _LONGEST:
            return
        token, _, question = bytes(read).partition(b" ")
        if hmac.compare_digest(token, self.contact.token.encode()):
            with contextlib.suppress(OSError, ValueError):
                connection.send(json.dumps(self._answer(json.loads(question))).encode() + b"\n")
        self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        self._callers.pop(descriptor)[0].close()


def ask(contact: Contact, question: Any, seconds: float) -> Any:
    """Return the answer to `question`, which must arrive within `seconds`.

    Raises ConnectionError when nobody answers questions there, because the process has ended, and another OSError,
    such as TimeoutError, when no answer arrives.
    """
    deadline = time.monotonic() + seconds
    answer = bytearray()
    with socket.create_connection((contact.host, contact.port), seconds) as connection:
        connection.sendall(f"{contact.token} {json.dumps(question)}\n".encode())
        while not answer.endswith(b"\n"):
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
            part = connection.recv(_LONGEST)
            if not part or len(answer) > _LONGEST:
                raise ConnectionError(f"no rank answers at {contact.host}:{contact.port}")
            answer += part
    try:
        return json.loads(answer)
    except ValueError:
        raise ConnectionError(f"another program answers at {contact.host}:{contact.port}") from None


# What each member of a process set is doing while a call waits for some of them.

WAITING, LEFT, ABSENT, SILENT, ENDED = "waiting", "left", "absent", "silent", "ended"
"""A rank waits in the call, has left it, has not made it yet, does not answer, or its process has ended."""
BEHIND, INTERRUPTED, SUSPENDED = "behind", "interrupted", "suspended"
"""A rank waits in another call of the same process set, an exception has ended a call on this rank alone, or its
process did not run for so long that the others gave up."""


@dataclass(frozen=True)
class State:
    """What one rank is doing."""

    kind: str
    call: str = ""
    """The call in which the rank waits, if it waits; for INTERRUPTED, the exception."""
    seconds: float = 0.0
    """For SUSPENDED: how long its process did not run."""

    def __str__(self) -> str:
        if self.kind == SILENT:
            return "no answer: stopped, or cut off from the network"
        if self.kind == ENDED:
            return "process ended, or called shutdown()"
        if self.kind == INTERRUPTED:
            return f"interrupted by an exception: {self.call}"
        where = f"waiting in {self.call}" if self.call else "in no collective"
        if self.kind == SUSPENDED:
            return f"did not run for {self.seconds:.0f} s: stopped, or a thread kept Python's global lock; now {where}"
        return f"done with this call, {where}" if self.kind == LEFT else where


@dataclass(frozen=True)
class Survey:
    """What each member is doing, by its global rank."""

    states: Mapping[int, State]
    has_failed: bool = False
    """Whether the backend has failed, so that the call did not wait for ranks that are late."""

    def ranks(self, *kinds: str) -> list[int]:
        """Return the ranks whose state is of one of `kinds`."""
        return [rank for rank, state in self.states.items() if state.kind in kinds]

    @property
    def missing(self) -> list[int]:
        """The ranks that have not made the call, or that died or stopped in it.

        A rank that waits in another call is not missing if one has died or stopped: it waits for that one, too. Ranks
        may have ended because one has stopped, and they may come later if the backend has failed because one has ended.
        """
        causes = (SILENT, INTERRUPTED, SUSPENDED) if self.ranks(SUSPENDED) else (SILENT, INTERRUPTED, ENDED)
        gone = self.ranks(*causes)
        if gone and self.has_failed:
            return sorted(gone)
        absent = self.ranks(ABSENT) if gone else self.ranks(ABSENT, BEHIND)
        return sorted([*absent, *gone])

    def __str__(self) -> str:
        """Return what errors show: the missing ranks, then a row for each thing that ranks are doing."""
        groups: dict[State, list[int]] = defaultdict(list)
        present = [rank for rank in self.ranks(BEHIND, WAITING, LEFT) if rank not in self.missing]
        for rank in [*self.missing, *present]:
            groups[self.states[rank]].append(rank)
        rows = [f"  {shown_ranks(members)}: {state}" for state, members in groups.items()]
        return "\n".join([f"missing ranks: {self.missing}.", *rows])


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


# Which threads of the script wait for a call, and whether any of them could make another one.
#
# A rank is blocked when no thread of its script can make another call until a pending one ends. When all ranks are
# blocked and no call is pending on all of them, no call can ever run.

_waiting: dict[int, object] = {}
"""Thread -> the request for which it waits."""

_one_at_a_time = threading.RLock()

_LIBRARIES = (
    *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")),
    str(Path(__file__).resolve().parents[1]),
    "<frozen ",
)


class waiting_for:
    """A context manager: in its block, also inside another such block, this thread waits for `request`."""

    def __init__(self, request: object) -> None:
        self._request = request
        self._former: object | None = None

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._former = _waiting.get(thread)
        _waiting[thread] = self._request

    def __exit__(self, *raised: object) -> None:
        thread = threading.get_ident()
        if self._former is None:
            _waiting.pop(thread, None)
        else:
            _waiting[thread] = self._former


def awaited() -> frozenset[object]:
    """Return the requests for which threads wait."""
    return frozenset(list(_waiting.values()))


def is_blocked(pending: Collection[object]) -> bool:
    """Return whether each thread that could make another call waits for a request in `pending`.

    The main thread and threads that run code of the script can make calls. Threads that run only library code, such as
    idle threads of a pool, are assumed to wait for these; a timer is not.
    """
    with _no_garbage_collection():
        frames = sys._current_frames()
        stuck = {thread for thread in frames if _waiting.get(thread) in pending}
        in_backward = any(_is_native(thread) for thread in stuck)
        for thread in frames.keys() - stuck:
            if in_backward and _runs_backward(frames[thread]):
                continue
            if thread == threading.main_thread().ident or _runs_script(thread, frames[thread]):
                return False
        return True


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect no garbage in the block.

    `f_back` creates a frame. Until Python 3.12 that can begin a collection, in which other threads run and may leave
    the frame that is being created. One segmentation fault in the walk was seen; this is a possible cause, not proven.
    sys._current_frames collects nothing either (github.com/python/cpython/issues/106883, a deadlock). The text of
    faulthandler is no replacement: it crashed beside Horovod, whose thread creates a thread state without the GIL when
    it drops a tensor, and faulthandler reads the half-made state.
    """
    with _one_at_a_time:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


def _is_native(thread: int) -> bool:
    """Return whether a library in C++ has started the thread, as autograd does for each GPU."""
    return isinstance(threading._active.get(thread), threading._DummyThread | None)  # type: ignore[attr-defined]


def _runs_backward(frame: FrameType) -> bool:
    """Return whether the thread waits for the threads of autograd: for CUDA, hooks run in these."""
    return frame.f_code.co_name == "_engine_run_backward"


def _runs_script(thread: int, frame: FrameType | None) -> bool:
    if isinstance(threading._active.get(thread), threading.Timer):  # type: ignore[attr-defined]
        return True
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None


@functools.cache
def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or "site-packages" in file or "dist-packages" in file
