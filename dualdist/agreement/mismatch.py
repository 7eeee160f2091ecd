"""The messages of errors that the members raise because their calls do not match."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .call import Call
from .verdict import Entry, shown_ranks

__all__ = ("calls_differ", "calls_failed", "nothing_matches")

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
    rows = [
        f"  {shown_ranks([rank])} has started {call.brief}"
        for rank, calls in others.items()
        for call in calls
    ]
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


def calls_failed(failed: Mapping[int, Entry]) -> str:
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
    return next(
        (key for key in keys if len({repr(dict(call.arguments).get(key)) for call in calls}) > 1), "name"
    )


def _first_entry(values: Sequence[object]) -> int | None:
    """Return the index of the first entry in which `values` differ; None unless each is a tuple of (name, ...) entries.

    An example of such a value is the list of a model's parameters.
    """
    lists = [value for value in values if isinstance(value, tuple)]
    named = all(isinstance(entry, tuple) and isinstance(entry[0], str) for each in lists for entry in each)
    if not named or len(lists) < len(values):
        return None
    places = range(max(map(len, lists)))
    return next(
        (place for place in places if len({repr(each[place : place + 1]) for each in lists}) > 1), None
    )


def _shortened(call: Call, argument: str, entry: int) -> Call:
    """Return `call` with one entry of `argument` as its only argument, for a message."""
    value = dict(call.arguments)[argument]
    shown = value[entry] if entry < len(value) else "nothing"
    return replace(call, arguments=((f"{argument}[{entry}]", shown),))
