"""Finds the ranks that a collective waits for, on every backend.

Which of the members are missing (`Survey.missing`), by what each of them does:

    it does                                       the call has stalled         the backend has failed
    WAITING in the call, or has LEFT it           no                           no
    ABSENT: in no call                            yes                          no, it may come later
    OUTSIDE: in a call of torch.distributed       if no rank is ABSENT         no, it may come later
    BEHIND: in another call of the process set    if no rank ended or stopped  no, it may come later
    SILENT: does not answer                       yes                          if no rank ended; it may be slow
    SUSPENDED: did not run for long               yes                          yes
    INTERRUPTED by an exception                   yes (*)                      yes (*)
    ENDED: its process, or it has left the world  unless one is SUSPENDED (*)  unless one is SUSPENDED (*)
    FOLLOWED: ENDED because of others, as it said no, but these are if no other rank ended

    (*) Of several, those that others have named; else those that left because of an exception; else all.

A rank raises StallError if the call has stalled here, or if another rank gave up its call while this one was in
another. Otherwise the backend has failed: HorovodInternalError, whose cause are the missing ranks. What another rank
found first counts if it waited in the same call (`WatchedChannel.explain`).

A rank that has waited for `stall_warn_seconds` reports this to rank 0, which asks all members what they are doing and
logs which ranks are missing for which call. One thread per rank does this, so collectives do not slow down. When a call
fails, its rank asks the members itself, for the error. Another thread answers.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..core.agreement.call import LONGEST_TEXT, Call, Record
from ..core.agreement.guard import GAVE_UP, Observer, Pending
from ..core.backends.base import Work
from ..core.checks import shown_ranks
from ..core.launch import number_in
from ..core.types import Settings
from ..errors import HorovodInternalError, StallError, logger
from .report import Report, combined, lines, shares
from .status import Contact, StatusServer, ask, call_of_torch
from .timeline import ChannelRecorder, Timeline
from .usage import Usage, reduced_bytes

WAITING, LEFT, ABSENT, SILENT, ENDED = "waiting", "left", "absent", "silent", "ended"
BEHIND, INTERRUPTED, SUSPENDED, FOLLOWED = "behind", "interrupted", "suspended", "followed"
OUTSIDE, OUTSIDE_TEXT = "outside", "torch.distributed"


class Doing(NamedTuple):
    """What one rank is doing."""

    kind: str
    text: str
    call: str = ""
    """The call in which the rank waits, if it waits."""


@dataclass(frozen=True)
class Survey:
    """What each member is doing, by its global rank."""

    members: Mapping[int, Doing]
    has_failed: bool = False
    """Whether the backend has failed, so that the call did not wait for ranks that are late."""
    causes: Collection[int] = ()
    """The ranks because of which others have given up calls, as they have said."""
    succeeded: Collection[int] = ()
    """Ranks that have left the world, but not because of an exception."""

    def ranks(self, *kinds: str) -> list[int]:
        """Return the ranks that do one of `kinds`."""
        return [rank for rank, doing in self.members.items() if doing.kind in kinds]

    @property
    def missing(self) -> list[int]:
        """The ranks that have not made the call, or that died or stopped in it: see the table above."""
        if self.ranks(SUSPENDED):
            gone = self.ranks(SILENT, INTERRUPTED, SUSPENDED)
        else:
            gone = self._ended()
            if not gone or not self.has_failed:
                gone += self.ranks(SILENT)
        if self.has_failed:
            return sorted(gone)
        absent = self.ranks(ABSENT) or self.ranks(OUTSIDE)
        absent += [] if gone else self.ranks(BEHIND)
        return sorted([*absent, *gone])

    def _ended(self) -> list[int]:
        """Return the ranks that have ended first, as far as this rank can know."""
        ended = self.ranks(INTERRUPTED, ENDED)
        # Launchers end ranks that had no time to say why. The others have named the first one before.
        named = [rank for rank in ended if rank in self.causes]
        failed = [rank for rank in ended if rank not in self.succeeded]
        return named or failed or ended or (list(self.causes) if self.ranks(FOLLOWED) else [])

    def __str__(self) -> str:
        """Return what errors show: the missing ranks, then a row for each thing that ranks are doing."""
        missing = self.missing
        groups: dict[Doing, list[int]] = defaultdict(list)
        known = [rank for rank in missing if rank in self.members]  # the cause may be in another process set
        for rank in [*known, *(rank for rank in self.members if rank not in missing)]:
            groups[self.members[rank]].append(rank)
        rows = [f"  {shown_ranks(ranks)}: {doing.text}" for doing, ranks in groups.items()]
        return "\n".join([f"missing ranks: {missing}.", *rows])


_STALLED_SECONDS = 5.0
"""How long to wait for the other ranks' answers when a call has stalled."""
_FAILED_SECONDS = 2.0
"""The same when the backend has failed: an elastic job continues soon."""
_MOST_QUESTIONS = 32
"""How many ranks to ask at a time."""
_LOOK_SECONDS = 60.0
"""How often rank 0 looks whether the others wait for one rank."""
_SHARE, _SLOW_SHARE = "DUALDIST_SLOW_WARN_SHARE", 0.25
_LAST_CALLS = 200
"""How many calls a rank remembers."""
ASKED = "a rank received SIGUSR2"
"""Why ranks write a file for `dualdist hang`, beside GAVE_UP."""


CallKey = tuple[str, str | None]
"""`Call.key`: which calls of the members match."""
_profiler_runs = torch._C._autograd._profiler_enabled


class WatchedChannel(Observer):
    """What this rank does on one channel, for itself and for the other members, which may ask.

    It passes on what others need of that: always the times of waits, and all while there is a recorder.
    """

    def __init__(self, watch: StallWatch, name: str, ranks: tuple[int, ...], pending: Pending | None) -> None:
        self._watch, self.name, self.ranks, self.pending = watch, name, ranks, pending
        self._recorder: ChannelRecorder | None = None
        """Records the current call for a timeline or a profiler, if there is one."""
        self.number = 0
        """How many calls began. Equal on all members when they are in step."""
        self.wait: tuple[int, Call, float] | None = None
        """The call for which this rank waits, its number, and since when."""
        self.reported = 0
        """The number of the last call of which this rank has reported that it waits too long."""
        self.gave_up = False
        """Whether `wait` stalled. It is kept: other members give up at the same time, and their errors show it."""
        self.notice: str | None = None
        """What another rank found when it gave up its call."""
        self.is_from_partner = False
        """Whether `notice` is from a rank for which this one was not missing: it waited for the same call."""
        self.is_crossed = False
        """Whether another rank gave up its call while this rank waited for another one."""
        self.failures: dict[str, str] = {}
        self.num_agreed = 0
        """How many calls the members have agreed on."""
        self._record: Record | None = None
        """The current call's record. Set only for channels without agreements."""

    @property
    def process_set(self) -> str:
        """The name of its process set, which may have several channels."""
        return self.name.partition(",")[0]

    def begun(self, call: Call) -> None:
        self.number += 1
        self.wait = self.number, call, time.monotonic()
        if self.pending is None:
            self._record = Record(call, time.time_ns())
            self.called(self._record)
            self.agreed(call, self._record, ())

    def agreeing(self, call: Call) -> bool:
        timeline = self._watch.timeline
        is_recorded = timeline.file is not None or _profiler_runs()  # it may have started now
        self._recorder = timeline.of_channel(self.name, self.ranks) if is_recorded else None
        return self._recorder is not None and self._recorder.agreeing(call)

    def ended(self) -> None:
        if self._recorder is not None:
            self._recorder.ended()
        if not self.gave_up:
            self.wait = None
            if self._record is not None:
                self._record.ended = time.time_ns()

    def called(self, record: Record) -> None:
        record.channel = self.name
        self._watch.last_calls.append(record)
        self._watch.usage.reduced += reduced_bytes(record.call.arguments)

    def agreed(self, call: Call | None, record: Record | None, arrivals: Sequence[int]) -> None:
        self.num_agreed += 1
        if record is not None:
            record.number, record.agreed = self.num_agreed, time.time_ns()
        if self._recorder is not None:
            self._recorder.agreed(call, arrivals)

    def sent(self, work: Work, name: str, params: Iterable[str], bucket: torch.Tensor) -> Work:
        self._watch.usage.reduced += bucket.nbytes
        timeline = self._watch.timeline
        if timeline.file is None and not _profiler_runs():
            return work
        return timeline.of_channel(self.name, self.ranks).sent(work, name, params, bucket)

    def waited(self, record: Record, since: int) -> None:
        self._watch.usage.waited(record, since)

    def waited_for_data(self, since: int) -> None:
        self._watch.usage.waited_for_data(since)

    def interrupted(self, error: BaseException) -> None:
        self._watch.interrupted[self.process_set] = repr(error)[:LONGEST_TEXT]

    def note(self, why: str) -> Callable[[], str]:
        return self._watch.dump(why, time.time_ns())

    def explain(
        self, call: Call, error: HorovodInternalError, succeeded: Sequence[int], stop: Callable[[], None]
    ) -> tuple[str, HorovodInternalError]:
        found = self.give_up() if isinstance(error, StallError) or self.is_crossed else None
        stop()
        found = found or self.notice
        if found is not None:
            stalled = f"{call.brief} stalled; {found}"
            return stalled.splitlines()[0], StallError(stalled)
        survey = self.fail(succeeded)
        if not survey.missing or self.failures:  # another rank has said why before it ended
            failed = f"{call.brief} failed: {str(error).rstrip('.')}."
            return failed, HorovodInternalError(
                f"{failed} Look for the first error of another rank, or for a failure of the network"
                f"{f'; {survey}' if survey.missing else '.'}"
            )
        causes = shown_ranks(survey.missing)
        failed = f"{call.brief} failed: the cause is {causes}"
        advice = "Look for its first error, or for a failure of the network"
        if set(survey.missing) <= set(succeeded):
            advice = (
                f"{causes.capitalize()} ended or called shutdown(), without an exception and without this call. Let "
                "all ranks make the same calls. If one had fewer batches than the others, give all the same number, or "
                "call join() at the end"
            )
        broken = f"{failed}; {str(survey).splitlines()[0]}"
        return broken, HorovodInternalError(f"{failed}. {advice}; {survey}")

    def cause(self) -> str:
        return str(self.fail())

    def others_gave_up(self) -> bool:
        return any(rank in self.ranks for rank in self._watch.reasons)

    def survey(self, *, has_failed: bool = False) -> Survey:
        """Return what the members are doing, seen from the current call, or from none.

        has_failed: the backend has failed; otherwise the call has stalled.
        """
        wait = self.wait
        number, key = (self.number, ("", None)) if wait is None else (wait[0], wait[1].key)
        return self._watch.survey(self, number, key, has_failed=has_failed)

    def give_up(self) -> str:
        """Return why the current call has stalled, and let the ranks that answer know that this rank gives it up."""
        survey = self.survey()
        self.gave_up = True
        self._say_why(survey, str(survey))
        # A partner may have left the world since its notice, so that this rank would find that it has ended.
        return self.notice if self.notice is not None and self.is_from_partner else str(survey)

    def fail(self, succeeded: Collection[int] = ()) -> Survey:
        """Return what the members are doing when the backend has failed, and let them know why this rank gives up.

        succeeded: ranks that have left the world, but not because of an exception.
        """
        survey = replace(self.survey(has_failed=True), succeeded=succeeded)
        if survey.missing:
            self._say_why(survey)
        return survey

    def _say_why(self, survey: Survey, text: str = "") -> None:
        """Let all ranks know what this rank has found: it may end. text: what to say of the call, if it has stalled."""
        wait = self.wait
        call = "no collective" if wait is None else wait[1].brief
        gone = survey.ranks(*([SILENT, INTERRUPTED] if text else []), ENDED, FOLLOWED)
        self._watch.tell(
            [rank for rank in range(self._watch.size) if rank not in gone],
            ["notice", self.name, self._watch.rank, survey.missing, call, text, time.time_ns()],
        )

    def report_failure(self, step: str, text: str) -> None:
        self._watch.tell(self.ranks, ["failure", self.name, step, text])


class StallWatch:
    """Watches the collectives of one world for missing ranks."""

    def __init__(self, rank: int, size: int, address: str, settings: Settings) -> None:
        self.rank, self.size = rank, size
        self._settings = settings
        env, unit = settings.env, "at most 1"
        self.slow_share = number_in(env, _SHARE, unit=unit, most=1.0) if _SHARE in env else None
        """Rank 0 logs it if the others wait this share of a minute longer for one rank; 1: never. None: the default."""
        self.channels: dict[str, WatchedChannel] = {}
        self._due: dict[tuple[str, int, CallKey], float] = {}
        """(channel, number, key) -> when to ask the members and log; infinite afterwards. Others may be a little late.
        """
        shortest = min(settings.stall_warn_seconds, settings.stall_timeout_seconds)
        self._pause = min(5.0, max(0.02, shortest / 8))
        self._next_tick = math.inf
        """When the thread should check again; infinite while it checks."""
        self._suspension, self._suspension_end = 0.0, -math.inf
        """How long no thread could run, as in a process that was stopped (SIGSTOP), and until when."""
        self._stopping = threading.Event()
        # In a world of one for SIGUSR2 alone, which is taken only if a folder was asked for.
        self.server = StatusServer(address, self._answer) if size > 1 or settings.env.get("DUALDIST_DUMP_DIR") else None
        self._contacts: Sequence[Contact] = ()
        self.reasons: dict[int, tuple[list[int], str]] = {}
        """Rank -> because of which ranks it has given up a call, and which one. Every rank says so before it ends."""
        self.interrupted: dict[str, str] = {}
        """Process set -> the error that has ended a call of one of its channels on this rank alone."""
        self.last_calls: deque[Record] = deque(maxlen=_LAST_CALLS)
        self.usage = Usage()
        self._next_look = time.monotonic() + _LOOK_SECONDS
        self._spent: Sequence[Sequence[int]] = ()
        """On rank 0: of each rank what `usage.values` was when it was last asked."""
        self._slow: Report | None = None
        self.timeline: Timeline
        """Of the world. WorldObservation sets it."""
        self.dump: Callable[[str, int], Callable[[], str]] = lambda why, asked: str
        """Starts to write a file (observation/dump.py) because of `why`, which the first rank asked for at `asked`.

        Returns a function that waits for that, at most 2 s, and returns a sentence that names the file, or "".
        """
        self.main_stack: Callable[[], Sequence[tuple[str, int, str]]] = list
        """Returns the frames of the main thread (observation/dump.py), the innermost first: file, line and function."""
        self._thread = threading.Thread(target=self._check_repeatedly, name="dualdist-stall", daemon=True)

    def start(self, contacts: Sequence[Contact]) -> None:
        """Start watching. contacts: of all ranks of the world."""
        self._contacts = contacts
        if self.size > 1:
            self._thread.start()

    def add_channel(self, name: str, ranks: tuple[int, ...], pending: Pending | None = None) -> WatchedChannel:
        """Add a channel, as `Observation.observer`. Without `pending`, calls are not agreed on, and recorded here."""
        channel = self.channels[name] = WatchedChannel(self, name, ranks, pending)
        return channel

    def survey(self, channel: WatchedChannel, number: int, key: CallKey, *, has_failed: bool = False) -> Survey:
        """Return what the members of `channel` are doing, seen from a call with this number and key."""
        seconds = _FAILED_SECONDS if has_failed else _STALLED_SECONDS
        seconds = min(seconds, self._settings.stall_timeout_seconds)

        ask = functools.partial(self._doing, channel=channel, number=number, key=key, seconds=seconds)
        with ThreadPoolExecutor(min(_MOST_QUESTIONS, len(channel.ranks)), "dualdist-survey") as pool:
            try:
                found = list(pool.map(ask, channel.ranks))
            except RuntimeError:  # the interpreter ends, and starts no thread
                found = list(map(ask, channel.ranks))
        if has_failed and self.size > 1:
            self._try_to_ask(self.rank, ["", channel.name])  # reads first what ranks said before they ended
        members = dict(zip(channel.ranks, found, strict=True))
        for rank, doing in members.items():
            if doing.kind == ENDED and rank in self.reasons:
                causes, call = self.reasons[rank]
                members[rank] = Doing(FOLLOWED, f"ended because of {shown_ranks(causes)}, in {call}")
        return Survey(members, has_failed, {rank for causes, _ in self.reasons.values() for rank in causes})

    def tell(self, ranks: Iterable[int], message: Any) -> None:
        """Send `message` to those of the other `ranks` that answer. Waits a few seconds at most."""
        others = [rank for rank in ranks if rank != self.rank]
        pool = ThreadPoolExecutor(min(_MOST_QUESTIONS, len(others) or 1), "dualdist-tell")
        with pool, contextlib.suppress(RuntimeError):  # the interpreter ends, and the connections with it
            pool.map(lambda rank: self._try_to_ask(rank, message), others)

    def close(self) -> None:
        """End the watch."""
        self._stopping.set()
        if self.server is not None:
            self.server.close()
        if self._thread.is_alive():
            self._thread.join(_STALLED_SECONDS)

    def abandon(self) -> None:
        """In a forked process, close its descriptors. Local."""
        if self.server is not None:
            self.server.abandon()

    def _doing(self, rank: int, channel: WatchedChannel, number: int, key: CallKey, seconds: float) -> Doing:
        question = ["position", channel.name, key]
        try:
            answer = self._ask(rank, question, seconds)
        except ConnectionError:
            return Doing(ENDED, "process ended, or called shutdown()")
        except OSError:
            slow = ("", "") if seconds > _FAILED_SECONDS else (f" for {seconds:g} s", "slow, ")
            why = self.state(rank) or f"{slow[1]}stopped, or cut off from the network"
            return Doing(SILENT, f"no answer{slow[0]}: {why}")
        (began, has_key, call), elsewhere, suspended, interrupted = answer
        where = f"waiting in {call or elsewhere}" if call or elsewhere else "in no collective"
        if interrupted is not None:
            return Doing(INTERRUPTED, f"interrupted by an exception: {interrupted}")
        if began > number or (began == number and not call):
            return Doing(LEFT, f"done with this call, {where}")
        if suspended is not None:
            how_long = f"did not run for {suspended:.0f} s"
            return Doing(SUSPENDED, f"{how_long}: stopped, or a thread kept Python's global lock; now {where}")
        if not call:
            return Doing(OUTSIDE if elsewhere == OUTSIDE_TEXT else ABSENT, where)
        return Doing(WAITING if began == number and has_key else BEHIND, where, call)

    def state(self, rank: int) -> str:
        """Return what /proc says of a rank that does not answer; "" if it is on another host."""
        own = self.server and self.server.contact
        return self._contacts[rank].state(own) if own and self._contacts else ""

    def _ask(self, rank: int, question: Any, seconds: float) -> Any:
        return self._answer(question) if rank == self.rank else ask(self._contacts[rank], question, seconds)

    def _try_to_ask(self, rank: int, question: Any) -> bool:
        with contextlib.suppress(OSError):
            ask(self._contacts[rank], question, _FAILED_SECONDS)
            return True
        return False

    def _answer(self, question: Any) -> Any:
        about, name, *rest = question
        channel = self.channels.get(name) or WatchedChannel(self, name, (), None)  # not added yet
        if about == "report":
            number, (kind, call_name) = rest
            self._make_due(name, number, (kind, call_name))
        elif about == "notice":
            rank, missing, call, text, asked = rest
            self.dump(GAVE_UP, asked)
            self.reasons.setdefault(rank, (missing, call))  # a later one may be a consequence
            if text and self.rank in channel.ranks:
                is_missing = self.rank in missing
                if not channel.is_from_partner:
                    channel.notice, channel.is_from_partner = text, not is_missing
                channel.is_crossed |= is_missing and channel.wait is not None
        elif about == "dump":
            self.dump(ASKED, rest[0])
        elif about == "spent":
            return self.usage.values()
        elif about == "failure":
            step, text = rest
            channel.failures.setdefault(step, text)  # a later one may be a consequence
        elif about == "position":
            ((kind, call_name),) = rest
            wait, position = channel.wait, (channel.number, False, "")
            if wait is not None:
                calls = wait[1], *(channel.pending or tuple)()
                has_key = any(call.key == (kind, call_name) for call in calls)
                position = wait[0], has_key, wait[1].brief
            elsewhere = (
                f"{wait[1].brief} of process {other.process_set}"
                for other in list(self.channels.values())
                if other is not channel and (wait := other.wait) is not None and not other.gave_up
            )
            interrupted = self.interrupted.get(channel.process_set)
            where = next(elsewhere, "") or OUTSIDE_TEXT * bool(call_of_torch(self.main_stack()))
            return position, where, self._suspended_seconds(), interrupted
        return None

    def _check_repeatedly(self) -> None:
        while True:
            self._next_tick = time.monotonic() + self._pause
            ends = self._stopping.wait(self._pause)
            now = time.monotonic()
            late, self._next_tick = now - self._next_tick, math.inf
            if late >= self._settings.stall_timeout_seconds:
                self._suspension, self._suspension_end = late, now
            if ends:
                return
            self._report()
            self._log()
            if self.rank == 0 and now >= self._next_look and self.slow_share != 1:
                self.look_for_slow_rank()

    def _suspended_seconds(self) -> float | None:
        """Return how long no thread could run recently; None if not for as long as the others wait."""
        now, most = time.monotonic(), self._settings.stall_timeout_seconds
        if now - self._next_tick >= most:  # the thread has not had the time to notice it
            return now - self._next_tick
        return self._suspension if now - self._suspension_end < 2 * most else None

    def _report(self) -> None:
        """Report to rank 0 which calls have waited too long. If it does not answer, this rank logs them itself."""
        last = time.monotonic() - self._settings.stall_warn_seconds
        for channel in list(self.channels.values()):
            number, call, since = channel.wait or (0, None, 0.0)
            if call is None or since > last or number == channel.reported or channel.gave_up:
                continue
            channel.reported = number
            report = channel.name, number, call.key
            if self.rank == 0 or not self._try_to_ask(0, ["report", *report]):
                self._make_due(*report)

    def look_for_slow_rank(self) -> None:
        """On rank 0, log it if the others have waited for one rank since the last call. Waits a few seconds at most."""
        self._next_look = time.monotonic() + _LOOK_SECONDS
        before, self._spent, ranks = self._spent, (), range(self.size)
        pool = ThreadPoolExecutor(_MOST_QUESTIONS, "dualdist-spent")
        with contextlib.suppress(OSError, FutureTimeoutError):
            ask_rank = functools.partial(self._ask, question=["spent", ""], seconds=_FAILED_SECONDS)
            self._spent = list(pool.map(ask_rank, ranks, timeout=_FAILED_SECONDS))
        pool.shutdown(wait=False, cancel_futures=True)
        both = enumerate(zip(before, self._spent, strict=False))  # one may be empty
        rows = [shares(*spent, rank, self.size) for rank, spent in both]
        self._slow = combined(rows, self._slow) if rows else None
        hint = ""
        if self.slow_share is None and self.usage.end_measuring is None:
            hint = f" Data loading counts as computing unless you set {_SHARE}={_SLOW_SHARE}."
        if self._slow is not None and self._slow["share"] >= (self.slow_share or _SLOW_SHARE):
            logger.warning("%s%s DUALDIST_SLOW_WARN_SHARE=1 turns this message off.", lines(self._slow)[-1], hint)

    def _make_due(self, channel: str, number: int, key: CallKey) -> None:
        self._due.setdefault((channel, number, key), time.monotonic() + 2 * self._pause)

    def _log(self) -> None:
        now = time.monotonic()
        for report in [report for report, due in list(self._due.items()) if due <= now]:
            self._due[report] = math.inf
            name, number, key = report
            if name not in self.channels:  # this rank is late in adding it
                continue
            survey = self.survey(self.channels[name], number, key)
            waiting = survey.ranks(WAITING)
            # Without a missing rank, the late one has arrived since the report.
            if not waiting or not survey.missing or self.rank not in (0, waiting[0]):
                continue
            logger.warning(
                "Stalled for %g s: ranks %s wait in %s; missing ranks: %s.",
                self._settings.stall_warn_seconds,
                waiting,
                survey.members[waiting[0]].call,
                survey.missing,
            )
