"""How the members of a process set agree when all of them make the same call, which must be fast.

Each member sends a digest of its oldest pending call, its state (active, joined or failed), the call's flag and count,
the time (for the timeline), and the call's payload. A payload is data small enough to be sent with the agreement, so
that a small reduction costs one exchange instead of two. If all members are active and all digests are equal, the call
runs. Otherwise the members exchange all their pending calls; see matching.py.

Equal messages are sent as one (connections.py), but times always differ. So in a large world the members exchange the
times after the calls, and only if the member that writes a timeline has asked for them. Then an agreement of n members
costs each of them log2(n) messages and O(log n) bytes, unless payloads, counts or calls differ.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

from ..backends.base import Group
from .call import Call
from .connections import Connections

ACTIVE, JOINED, FAILED = range(3)
_MESSAGE = struct.Struct("<16sB?6xqq")
"""Digest, state, the call's flag and count, time. A large world has instead of the time: 1 to ask for it, else 0."""
_TIME = struct.Struct("<q")
_SMALL_WORLD = 8
"""The most members that send the time with the call: one exchange of a few more bytes costs less than two."""
_PAYLOAD_BYTES = 2048
_PAYLOAD_BYTES_OF_ALL = 64 << 10


class PendingCall(NamedTuple):
    """A call of one member that has not ended, as it contributes to agreements."""

    state: int
    call: Call
    error: str = ""
    """For a FAILED entry: the error that its rank raised."""
    issued: int = 0
    """When the member made the call, in nanoseconds since the epoch by its own clock."""


class Verdict(NamedTuple):
    """What the members do about one call; the same on every member."""

    call: Call | None
    """What the members run; None when there is nothing to run."""
    joined: frozenset[int] = frozenset()
    """Places (indices in the process set) of the members that have joined and did not make the call."""
    counts: tuple[int, ...] = ()
    """Every member's `Call.count`."""
    flags: tuple[bool, ...] = ()
    """Every member's `Call.flag`."""
    payloads: tuple[bytes, ...] = ()
    """Every member's payload; empty unless all sent it with the agreement."""
    error: str | None = None
    """The message of the error that the members in `raising` raise."""
    raising: frozenset[int] = frozenset()
    """Places of the members that raise `error`."""
    arrivals: tuple[int, ...] = ()
    """When each member made its call, in nanoseconds since the epoch by its own clock. Empty if nobody needs it."""


T = TypeVar("T")

Execute = Callable[[Group, Verdict], T]
"""Moves the data of a call over the group, after the agreement; returns the result."""


def payload_capacity(size: int, most: int = _PAYLOAD_BYTES) -> int:
    """Return how many bytes of payload each of `size` members may send with a call, at most `most`."""
    return min(most, _PAYLOAD_BYTES_OF_ALL // size)


def agree(
    connections: Connections, state: int, call: Call, issued: int, *, needs_times: bool = False
) -> Verdict:
    """Return the verdict if all members are ACTIVE with the same call, else one without a call. Collective.

    issued: as in PendingCall. needs_times: whether this member needs `Verdict.arrivals`; it may differ between members.
    """
    digest, is_small = _digest(call.identity), connections.size <= _SMALL_WORLD
    message = _MESSAGE.pack(digest, state, call.flag, call.count, issued if is_small else needs_times)
    messages = connections.allgather_messages(message + call.payload)
    are_equal = messages.count(messages[0]) == len(messages)
    if not (is_small or needs_times) and state == ACTIVE and are_equal:
        every = connections.size
        return Verdict(
            call, counts=(call.count,) * every, flags=(call.flag,) * every, payloads=(call.payload,) * every
        )
    digests, states, flags, counts, arrivals = zip(*map(_MESSAGE.unpack_from, messages), strict=True)
    if not is_small and any(arrivals):
        times = connections.allgather_messages(_TIME.pack(issued))
        arrivals = tuple([time for message in times for (time,) in [_TIME.unpack(message)]])
    elif not is_small:
        arrivals = ()
    if set(states) == {ACTIVE} and set(digests) == {digest}:
        payloads = tuple([other[_MESSAGE.size :] for other in messages])
        return Verdict(call, counts=counts, flags=flags, payloads=payloads, arrivals=arrivals)
    return Verdict(None, arrivals=arrivals)


@functools.lru_cache(maxsize=1024)
def _digest(identity: Hashable) -> bytes:
    """Return a digest of `Call.identity`. Unequal ones have other digests."""
    return hashlib.blake2b(repr(identity).encode(), digest_size=16).digest()


def shown_ranks(members: Sequence[int]) -> str:
    """Return "rank 0" or "ranks 0, 1"."""
    return f"rank {members[0]}" if len(members) == 1 else f"ranks {', '.join(map(str, members))}"
