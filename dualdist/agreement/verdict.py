"""How the members of a process set agree before each collective.

Each member sends a digest of its call, its state (active, joined or failed), the call's flag and count, the time (for
the timeline), and the call's payload. A payload is data small enough to be sent with the agreement, so that a small
reduction costs one exchange instead of two. If all members are active and all digests are equal, nothing more is sent;
this case must be fast. Otherwise the members exchange their whole calls, and each computes the same verdict from them:

- run: the active members made the same call, and the other members have joined;
- raise: the calls differ, another rank failed in the same call, or the call is not supported after `join`;
- agree again: another rank failed in a call that this member did not make.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .call import Call
from .call_kinds import Data, WhenJoined
from .connections import Connections

__all__ = (
    "ACTIVE",
    "FAILED",
    "JOINED",
    "Entry",
    "Verdict",
    "agree",
    "payload_capacity",
    "resolve",
    "shown_ranks",
)

ACTIVE, JOINED, FAILED = range(3)
_MESSAGE = struct.Struct("<16sB?6xqq")  # digest, state, the call's flag and count, time
_PAYLOAD_BYTES = 2048
_PAYLOAD_BYTES_OF_ALL = 64 << 10


@dataclass(frozen=True)
class Entry:
    """What one member contributes to an agreement."""

    state: int
    call: Call
    error: str = ""
    """For a FAILED entry: the error that its rank raised."""


@dataclass(frozen=True)
class Verdict:
    """What all members do next; the same on every member."""

    call: Call | None
    """What the active members run; None when all members have joined or when there is nothing to run."""
    joined: frozenset[int] = frozenset()
    """Places (indices in the process set) of the members that have joined."""
    counts: tuple[int, ...] = ()
    """Every member's `Call.count`."""
    flags: tuple[bool, ...] = ()
    """Every member's `Call.flag`."""
    payloads: tuple[bytes, ...] = ()
    """Every member's payload; empty when a member has joined."""
    error: str | None = None
    """The message of the error that the members in `raising` raise."""
    raising: frozenset[int] = frozenset()
    """Places of the members that raise `error`."""
    drained: tuple[Call, ...] = ()
    """Calls of raising members that sent their data before the agreement; the other members must receive it."""
    arrivals: tuple[int, ...] = ()
    """When each member made its call, in nanoseconds since the epoch by its own clock."""


def payload_capacity(size: int) -> int:
    """Return how many bytes of payload a call may carry among `size` members."""
    return min(_PAYLOAD_BYTES, _PAYLOAD_BYTES_OF_ALL // size)


def agree(connections: Connections, entry: Entry) -> Verdict:
    """Return the verdict on the entries of all members. Collective over the members."""
    digest = hashlib.blake2b(repr(entry.call.identity).encode(), digest_size=16).digest()
    message = _MESSAGE.pack(digest, entry.state, entry.call.flag, entry.call.count, time.time_ns())
    messages = connections.allgather_messages(message + entry.call.payload)
    digests, states, flags, counts, arrivals = zip(*map(_MESSAGE.unpack_from, messages), strict=True)
    if set(states) == {ACTIVE} and set(digests) == {digest}:
        payloads = tuple(other[len(message) :] for other in messages)
        return Verdict(entry.call, counts=counts, flags=flags, payloads=payloads, arrivals=arrivals)
    entries = [pickle.loads(other) for other in connections.allgather_messages(pickle.dumps(entry))]
    return replace(resolve(entries, connections.ranks), arrivals=arrivals)


def resolve(entries: Sequence[Entry], ranks: Sequence[int]) -> Verdict:
    """Return the verdict on `entries`; `ranks` are the members' global ranks, for the message."""
    failed = [entry for entry in entries if entry.state == FAILED]
    active = {place: entry.call for place, entry in enumerate(entries) if entry.state == ACTIVE}
    joined = frozenset(place for place, entry in enumerate(entries) if entry.state == JOINED)
    if failed:
        # The arguments of a failed call are unknown, so calls from the same line of the user's code count as the same.
        sites = {entry.call.site for entry in failed}
        partners = frozenset(place for place, call in active.items() if call.site in sites)
        return Verdict(None, joined, error=_failure(entries, ranks), raising=partners)
    if not active:
        return Verdict(None, joined)
    first = next(iter(active.values()))
    everyone = frozenset(active)
    if any(call.identity != first.identity for call in active.values()):
        started = {call.identity: call for call in active.values() if call.kind.data is Data.BEFORE}
        return Verdict(
            None, joined, error=_mismatch(active, ranks), raising=everyone, drained=tuple(started.values())
        )
    if joined and first.kind.when_joined is WhenJoined.UNSUPPORTED:
        members = ", ".join(str(ranks[place]) for place in sorted(joined))
        return Verdict(
            None,
            joined,
            raising=everyone,
            error=f"{first} at {first.where} is not supported with Join at this time: ranks {members} have joined.",
        )
    counts, flags = zip(*((entry.call.count, entry.call.flag) for entry in entries), strict=True)
    return Verdict(first, joined, counts, flags)


def _mismatch(active: dict[int, Call], ranks: Sequence[int]) -> str:
    difference = _difference(list(active.values()))
    entry = _first_entry([dict(call.arguments).get(difference) for call in active.values()])
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for place, call in active.items():
        shown = call if entry is None else _shortened(call, difference, entry)
        groups[str(shown), call.where].append(ranks[place])
    rows = [f"  {shown_ranks(members)} called {call} at {where}" for (call, where), members in groups.items()]
    return "\n".join(
        [
            f"Mismatched {difference} between ranks:",
            *rows,
            "Every rank of a process set must call the same collectives in the same order.",
        ]
    )


def _difference(calls: Sequence[Call]) -> str:
    """Return in what `calls` differ: 'collectives', the name of the first argument that differs, or 'name'."""
    if len({call.kind for call in calls}) > 1:
        return "collectives"
    for key, _ in calls[0].arguments:
        if len({repr(dict(call.arguments).get(key)) for call in calls}) > 1:
            return key
    return "name"


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


def _failure(entries: Sequence[Entry], ranks: Sequence[int]) -> str:
    rows = [
        f"  rank {ranks[place]} failed in {entry.call} at {entry.call.where}: {entry.error}"
        for place, entry in enumerate(entries)
        if entry.state == FAILED
    ]
    return "\n".join(["The call failed on another rank before it could start:", *rows])


def shown_ranks(members: Sequence[int]) -> str:
    """Return "rank 0" or "ranks 0, 1"."""
    return f"rank {members[0]}" if len(members) == 1 else f"ranks {', '.join(map(str, members))}"
