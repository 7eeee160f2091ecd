"""Which of the members' pending calls run, and which raise, when the members do not all bring the same call.

Calls are matched by kind and name, as in Horovod, and those of the same kind and name by their order. Each member sends
all its pending calls, and whether its script is blocked, that is, can make no other call until one of them ends. Each
member computes the same from that:

- A call that all active members have made runs. If its arguments differ, it raises on all of them.
- A call that failed on one member before it could start raises on the members that made it: those that called from the
  same line of the script, since its arguments are unknown. A member that waits for a call of another line does not.
- If nothing matches and the scripts of all active members are blocked, all their pending calls raise.
- Otherwise the members wait until one of them has another call, or is blocked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..checks import shown_ranks
from .call import Call, Data
from .connections import ACTIVE, FAILED, JOINED, PendingCall, Verdict

# The messages of errors that the members raise because their calls do not match.

_MOST_ROWS = 20
"""How many calls that no thread waits for an error lists."""


def calls_differ(calls: Mapping[int, Call]) -> str:
    """Return the message for `calls` by rank, which have the same key but different arguments."""
    return "\n".join(
        [
            *_called({rank: [call] for rank, call in calls.items()}),
            "Calls are matched by kind and name, those without a name by their order on each rank. Matching calls must "
            "have equal arguments.",
        ]
    )


def nothing_matches(awaited: Mapping[int, Sequence[Call]], others: Mapping[int, Sequence[Call]]) -> str:
    """Return the message when every rank waits and no call is pending on all of them.

    awaited, others: by rank, the calls for which its script waits, and its other pending calls.
    """
    rows = [f"  {shown_ranks([rank])} has started {call.brief}" for rank, calls in others.items() for call in calls]
    if len(rows) > _MOST_ROWS:
        rows[_MOST_ROWS:] = [f"  and {len(rows) - _MOST_ROWS} more calls"]
    return "\n".join(
        [
            *_called(awaited),
            *rows,
            "Each rank waits for a call that another rank has not made. Every rank of a process set must make the same "
            "calls; their order may differ.",
        ]
    )


def calls_failed(failed: Mapping[int, PendingCall]) -> str:
    """Return the message for calls, by rank, that failed before they could start."""
    rows = [f"  rank {rank} failed in {entry.call.brief}: {entry.error}" for rank, entry in failed.items()]
    return "\n".join(["The call failed on another rank before it could start:", *rows])


def _called(calls: Mapping[int, Sequence[Call]]) -> list[str]:
    """Return the heading, which names the first difference, and a row for each call with the ranks that made it."""
    first = [made[0] for made in calls.values()]
    difference = _difference(first)
    entry = _first_entry([dict(call.arguments).get(difference) for call in first])
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, made in calls.items():
        for call in made:
            shown = call if entry is None else _shortened(call, difference, entry)
            groups[str(shown), call.where].append(rank)
    rows = [f"  {shown_ranks(members)} called {call} at {where}" for (call, where), members in groups.items()]
    return [f"Mismatched {difference} between ranks:", *rows]


def _difference(calls: Sequence[Call]) -> str:
    """Return in what `calls` differ: 'collectives', 'name', or the name of the first argument that differs."""
    if len({call.kind for call in calls}) > 1:
        return "collectives"
    if len({call.name for call in calls}) > 1:
        return "name"
    keys = (key for key, _ in calls[0].arguments)
    return next((key for key in keys if len({repr(dict(call.arguments).get(key)) for call in calls}) > 1), "name")


def _first_entry(values: Sequence[object]) -> int | None:
    """Return the index of the first entry in which `values` differ; None unless each is a tuple of (name, ...) entries.

    An example of such a value is the list of a model's parameters.
    """
    lists = [value for value in values if isinstance(value, tuple)]
    named = all(isinstance(entry, tuple) and isinstance(entry[0], str) for each in lists for entry in each)
    if not named or len(lists) < len(values):
        return None
    places = range(max(map(len, lists)))
    return next((place for place in places if len({repr(each[place : place + 1]) for each in lists}) > 1), None)


def _shortened(call: Call, argument: str, entry: int) -> Call:
    """Return `call` with one entry of `argument` as its only argument, for a message."""
    value = dict(call.arguments)[argument]
    shown = value[entry] if entry < len(value) else "nothing"
    return replace(call, arguments=((f"{argument}[{entry}]", shown),))


EntriesByIndex = dict[int, PendingCall]
"""Pending calls of one member, by their index in its Standing."""


@dataclass(frozen=True)
class Standing:
    """What one member waits for."""

    entries: tuple[PendingCall, ...]
    """Its pending calls in the order in which it made them."""
    awaited: frozenset[int] = frozenset()
    """Indices of the entries for which threads of its script wait."""
    blocked: bool = False
    """Whether its script can make no other call until one of the entries ends."""


@dataclass(frozen=True)
class Outcome:
    """What the members do about one call."""

    verdict: Verdict
    entries: tuple[int | None, ...]
    """For each member the index of its entry that ends with it; None: no entry."""


@dataclass(frozen=True)
class Match:
    """What all members do next, the same on every member. Without outcomes, they wait unless `is_over`."""

    outcomes: tuple[Outcome, ...] = ()
    joined: frozenset[int] = frozenset()
    """Places (indices in the process set) of the members that have joined."""
    drained: tuple[Call, ...] = ()
    """Calls that raise, but have sent their data before: the members that did not make them must receive it."""

    is_over: bool = False
    """Whether all members have joined: after the outcomes, `join` returns."""


def match(standings: Sequence[Standing], ranks: Sequence[int]) -> Match:
    """Return what the members do about the calls in `standings`. ranks: the members' global ranks, for messages."""
    failures = _failures(standings, ranks)
    pending = [dict(enumerate(standing.entries)) for standing in standings]
    outcomes = [failure for failure in failures if None not in failure.entries]
    for failure in failures:
        _remove(failure, pending, ends=failure in outcomes)
    joined = frozenset(
        place for place, own in enumerate(pending) if any(entry.state == JOINED for entry in own.values())
    )
    active = [place for place in range(len(ranks)) if place not in joined]
    outcomes += _match_calls(pending, active, ranks)
    if not outcomes:
        outcomes = _without_partners(failures, standings)
    if not outcomes and active and all(standings[place].blocked for place in active):
        outcomes = _end_all(pending, active, standings, ranks)
    raising = [
        standings[place].entries[index].call
        for outcome in outcomes
        for place, index in enumerate(outcome.entries)
        if place in outcome.verdict.raising and index is not None
    ]
    drained = {call.identity: call for call in raising if call.kind.data is Data.BEFORE}
    return Match(tuple(outcomes), joined, tuple(drained.values()), is_over=not active)


def _failures(standings: Sequence[Standing], ranks: Sequence[int]) -> list[Outcome]:
    """Return an outcome for each failed call, with the entries of the members that made a call from its line."""
    by_line: dict[Any, dict[int, int]] = defaultdict(dict)
    for place, standing in enumerate(standings):
        entries = dict(enumerate(standing.entries))
        for line, index in _numbered(entries, lambda call: call.site, (ACTIVE, FAILED)).items():
            by_line[line][place] = index
    outcomes = []
    for found in by_line.values():
        entries = {place: standings[place].entries[index] for place, index in found.items()}
        failed = {ranks[place]: entry for place, entry in entries.items() if entry.state == FAILED}
        if failed:
            partners = frozenset(place for place, entry in entries.items() if entry.state == ACTIVE)
            verdict = Verdict(None, error=calls_failed(failed), raising=partners)
            outcomes.append(Outcome(verdict, tuple(found.get(place) for place in range(len(ranks)))))
    return outcomes


def _remove(failure: Outcome, pending: Sequence[EntriesByIndex], ends: bool) -> None:
    """Remove from `pending` what cannot be matched otherwise because of `failure`.

    ends: whether the failure ends now. If not, later calls of its member wait: some would match the wrong ones.
    """
    for place, index in enumerate(failure.entries):
        if index is None:
            continue
        if ends:
            pending[place].pop(index, None)
        elif place not in failure.verdict.raising:
            for other in [other for other in pending[place] if other >= index]:
                del pending[place][other]


def _without_partners(failures: Sequence[Outcome], standings: Sequence[Standing]) -> list[Outcome]:
    """Return the first failure that ends although some members have not made the call: they wait for other calls."""
    return [
        failure
        for failure in failures
        if all(
            index is not None or standing.awaited or any(entry.state == JOINED for entry in standing.entries)
            for index, standing in zip(failure.entries, standings, strict=True)
        )
    ][:1]


def _match_calls(pending: Sequence[EntriesByIndex], active: Sequence[int], ranks: Sequence[int]) -> Iterable[Outcome]:
    """Yield an outcome for each call that all active members have made, in the order of the first of them."""
    keyed = [_numbered(own, lambda call: call.key) for own in pending]
    candidates = keyed[active[0]] if active else {key: 0 for own in keyed for key in own}
    for key in candidates:
        if all(key in keyed[place] for place in active):
            found = {place: own[key] for place, own in enumerate(keyed) if key in own}
            calls = {place: pending[place][index] for place, index in found.items()}
            yield Outcome(_judge(calls, ranks), tuple(found.get(place) for place in range(len(ranks))))


def _numbered(
    own: EntriesByIndex, kind_of: Callable[[Call], Hashable], states: Sequence[int] = (ACTIVE,)
) -> dict[Any, int]:
    """Return the indices of the calls by their kind and by how many older ones in these states have the same kind."""
    older: Counter[Any] = Counter()
    numbered = {}
    for index, entry in own.items():
        if entry.state in states:
            value = kind_of(entry.call)
            numbered[value, older[value]] = index
            older[value] += 1
    return numbered


def _judge(entries: Mapping[int, PendingCall], ranks: Sequence[int]) -> Verdict:
    """Return the verdict on `entries` with the same key, by place. The other members have joined."""
    calls = {place: entry.call for place, entry in entries.items()}
    everyone, first = frozenset(calls), next(iter(calls.values()))
    joined = frozenset(range(len(ranks))) - everyone
    if any(call.identity != first.identity for call in calls.values()):
        text = calls_differ({ranks[place]: call for place, call in calls.items()})
        return Verdict(None, joined, error=text, raising=everyone, steps_differ=first.kind.in_step)
    if joined and first.kind.stand_in is None:
        members = ", ".join(str(ranks[place]) for place in sorted(joined))
        text = f"{first} at {first.where} is not supported with Join at this time: ranks {members} have joined."
        return Verdict(None, joined, error=text, raising=everyone, steps_differ=first.kind.in_step)
    every = [entries.get(place) for place in range(len(ranks))]
    return Verdict(
        first,
        joined,
        counts=tuple(entry.call.count if entry else 0 for entry in every),
        arrivals=tuple(entry.issued if entry else 0 for entry in every),
    )


def _end_all(
    pending: Sequence[EntriesByIndex], active: Sequence[int], standings: Sequence[Standing], ranks: Sequence[int]
) -> list[Outcome]:
    """Return outcomes in which all pending calls of the active members raise, so that they are in step again."""
    awaited: dict[int, list[Call]] = defaultdict(list)
    others: dict[int, list[Call]] = defaultdict(list)
    ended: list[tuple[int, int]] = []
    for place in active:
        for index, entry in pending[place].items():
            kind = awaited if index in standings[place].awaited else others
            kind[ranks[place]].append(entry.call)
            ended.append((place, index))
    text = nothing_matches(awaited, others)
    return [
        Outcome(
            Verdict(None, error=text, raising=frozenset([place]), steps_differ=True),
            tuple(index if other == place else None for other in range(len(ranks))),
        )
        for place, index in ended
    ]
