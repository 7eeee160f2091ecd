"""Sockets between the members of a process set, for the few bytes that they exchange before each collective.

An agreement must cost little compared with the collective after it. A small collective of a backend wakes two or three
threads on each rank; here the calling thread itself writes and reads. Each member is connected to the members whose
place (index in the process set) differs from its own by a power of two. So n members need log2(n) rounds (Bruck et al.
1997, "Efficient algorithms for all-to-all communications in multiport message-passing systems", section 3) and a
process holds 2 log2(n) connections. Equal messages of neighbours are sent as one. So when all members send the same,
each round sends one message, whatever n is. When a peer dies, its connections close, and the others notice at once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import select
import socket
import struct
import time
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

from ...errors import HorovodInternalError, StallError
from ..backends.base import Group
from ..meeting.links import Links, Listener
from ..process import has_failed
from .call import Call

# Messages as bytes on a connection: each with its length and with the number of members in a row that have sent it.
#
# Members mostly send equal messages. Then what is sent for n members is as short as for one.

_HEADER = struct.Struct("<II")
"""The length of a message in bytes, and its number of members."""
GOODBYE = b"\xff\xff\xff\xff"
"""The last bytes of a process that leaves the world properly: the length of a message that is too long to arrive."""
SUCCESS = GOODBYE * 2
"""The same if no exception is why it leaves."""


def framed(messages: list[bytes]) -> bytes:
    """Return what is sent for `messages`, at least one. Equal ones that follow each other are sent as one."""
    first, count = messages[0], len(messages)
    if messages.count(first) == count:
        return _HEADER.pack(len(first), count) + first
    runs = [(message, len(list(equal))) for message, equal in itertools.groupby(messages)]
    return b"".join([_HEADER.pack(len(message), repeats) + message for message, repeats in runs])


def take_one(part: bytes, count: int) -> list[bytes]:
    """Return `count` messages if `part` is all of them and they are equal, else an empty list. The most common case."""
    if part.startswith(_HEADER.pack(max(0, len(part) - _HEADER.size), count)):
        return [part[_HEADER.size :]] * count
    return []


def take_unread(unread: bytearray, count: int) -> list[bytes]:
    """Remove the first `count` messages from `unread` and return them; an empty list while it does not hold them."""
    spans, end = [], 0
    while count > 0:
        start = end + _HEADER.size
        if len(unread) < start:
            return []
        length, repeats = _HEADER.unpack_from(unread, end)
        end = start + length
        count -= repeats
        spans.append((slice(start, end), repeats))
    if len(unread) < end:
        return []
    messages = [message for span, repeats in spans for message in [bytes(unread[span])] * repeats]
    del unread[:end]
    return messages


_LONGEST_POLL = 2**31 - 1
"""The longest timeout of poll(2): milliseconds in a C int."""
_READ_BYTES = 1 << 16


class Connections(Links):
    """The links of one member, for messages."""

    def __init__(
        self,
        listener: Listener | None,
        name: str,
        ranks: Sequence[int],
        rank: int,
        timeout: float,
        connect_timeout: float | None = None,
        check: Callable[[BaseException | None], object] = lambda cause: None,
    ) -> None:
        """Connect to the peers. Collective over `ranks`; a rank that is not a member gets no connections.

        listener: of this process; None in a world of one. name, check: as for `connect`. ranks, rank: as for Links.
        timeout: seconds to wait for the other members in each exchange. connect_timeout: and for their connections;
        None: the same.

        Raises HorovodInternalError if a peer cannot be reached.
        """
        super().__init__(ranks, rank)
        self._timeout = timeout
        if listener is not None and self.rank >= 0:
            addresses = [listener.ranks[member] for member in self.ranks]
            limit = timeout if connect_timeout is None else connect_timeout
            self.connect(listener, addresses, f"connections/{name}", limit, check)
        self._peers = {place: _Peer(connection) for place, connection in self.sockets.items()}
        self._rounds: list[tuple[int, _Peer, _Peer]] = []
        """For each round of an exchange: of how many members to send, to which peer, and from which peer to receive."""
        for distance in self.steps if self.sockets else ():
            target, source = (self._peers[(self.rank + step) % self.size] for step in (-distance, distance))
            self._rounds.append((min(distance, self.size - distance), target, source))

    def allgather_messages(self, message: bytes, seconds: float | None = None) -> list[bytes]:
        """Return every member's `message`, in rank order. Collective over the members.

        seconds: to wait for the others; None: the timeout of all exchanges.

        Raises StallError when a member does not send in time, HorovodInternalError when one has left.
        """
        messages = [message]  # messages[j] is from the member at place rank + j, modulo size
        deadline = self.deadline() if seconds is None else time.monotonic() + seconds
        try:
            for count, target, source in self._rounds:  # target and source may be the same peer
                unsent = memoryview(framed(messages[:count]))
                taken: list[bytes] = []
                while unsent := unsent[target.send(unsent) :]:
                    taken = taken or source.take(count)
                    _wait(target.socket, None if taken else source.socket, deadline)
                while not (taken := taken or source.take(count)):
                    source.wait(deadline)
                messages += taken
        except (OSError, ValueError) as error:
            raise _lost(error) from error
        return messages[self.size - self.rank :] + messages[: self.size - self.rank]

    def alert(self) -> None:
        """End `wait_for_peers` on all members, and return when all have called this. Collective over the members.

        Each sends to all of its peers at once: in `allgather_messages`, a round waits for the one before it.
        Raises as `allgather_messages` does.
        """
        deadline = self.deadline()
        try:
            for _, target, _ in self._rounds:
                unsent = memoryview(framed([b""]))
                while unsent := unsent[target.send(unsent) :]:
                    _wait(target.socket, None, deadline)
            for _, _, source in self._rounds:
                while not source.take(1):
                    source.wait(deadline)
        except (OSError, ValueError) as error:
            raise _lost(error) from error

    def wait_for_peers(self, signal: socket.socket, seconds: float) -> bool:
        """Wait until a peer has sent something, `signal` is readable, or for `seconds`. Return whether a peer has."""
        if any(peer._unread for peer in self._peers.values()):
            return True
        poll = select.poll()
        try:
            for held in (signal, *(peer.socket for peer in self._peers.values())):
                poll.register(held, select.POLLIN)
            ready = poll.poll(min(_LONGEST_POLL, 1e3 * seconds))
            return any(descriptor != signal.fileno() for descriptor, _ in ready)
        except (OSError, ValueError) as error:
            raise _lost(error) from error

    def deadline(self) -> float:
        """Return when a wait that begins now has stalled, on the clock of `time.monotonic`."""
        return time.monotonic() + self._timeout

    def lost_peers(self) -> list[int]:
        """Return the global ranks of the peers that have died, or have closed their connections on a failure. Local."""
        return self._left(GOODBYE, has_said=False)

    def has_lost_peer(self) -> bool:
        """Return whether there are `lost_peers`. Local."""
        return bool(self.lost_peers())

    def has_failed_peer(self) -> bool:
        """Return whether a peer has left because of an exception, or is among `lost_peers`. Local."""
        return bool(self._left(SUCCESS, has_said=False))

    def peers_that_succeeded(self) -> list[int]:
        """Return the global ranks of the peers that have left the world, but not because of an exception. Local."""
        return self._left(SUCCESS, has_said=True)

    def _left(self, goodbye: bytes, *, has_said: bool) -> list[int]:
        peers = self._peers
        left = [place for place in self.hung_up() if place in peers]
        return sorted(self.ranks[place] for place in left if peers[place].has_said(goodbye) == has_said)

    def say_goodbye(self) -> None:
        """Let `has_lost_peer` be false on the peers when this process closes its connections. Local."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.send(memoryview(GOODBYE if has_failed() else SUCCESS))

    def close(self) -> None:
        super().close()
        self._peers = {}  # the sockets of `_rounds` are closed: an exchange raises


class _Peer:
    """The connection to one peer. A peer may be one exchange ahead; its bytes are kept here until they are needed."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self.socket = connection
        self._unread = bytearray()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def has_said(self, goodbye: bytes) -> bool:
        """Return whether `goodbye` is the last that the peer, which has left, has sent."""
        last = b""
        with contextlib.suppress(OSError):  # the peer has not read everything; its goodbye may have arrived before
            last = self.socket.recv(_READ_BYTES, socket.MSG_PEEK)
        return (bytes(self._unread[-len(goodbye) :]) + last).endswith(goodbye)

    def send(self, message: memoryview) -> int:
        """Send what can be sent of `message` without waiting; return how many bytes that was."""
        try:
            return self.socket.send(message)
        except BlockingIOError:
            return 0

    def take(self, count: int) -> list[bytes]:
        """Return the next messages, of `count` members, or an empty list while they have not all arrived.

        Raises HorovodInternalError when the peer has left.
        """
        # Check this before the socket: the peer may have sent them and left.
        if self._unread and (messages := take_unread(self._unread, count)):
            return messages
        try:
            part = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        if not part:
            raise HorovodInternalError("a rank has left")
        if not self._unread and (messages := take_one(part, count)):
            return messages
        self._unread += part
        return take_unread(self._unread, count)

    def wait(self, deadline: float) -> None:
        """Wait until the peer has sent something or has left. Raises StallError at the deadline."""
        _poll_until(deadline, self._poll)


def _lost(error: OSError | ValueError) -> HorovodInternalError:
    """Return the error of an exchange. A ValueError means that another thread has closed a socket."""
    return HorovodInternalError(f"the connection to a rank was lost: {error}")


def _wait(writable: socket.socket, readable: socket.socket | None, deadline: float) -> None:
    poll = select.poll()
    if readable is not None:
        poll.register(readable, select.POLLIN)
    poll.register(writable, select.POLLOUT | (select.POLLIN if writable is readable else 0))
    _poll_until(deadline, poll)


def _poll_until(deadline: float, poll: select.poll) -> None:
    if not poll.poll(min(_LONGEST_POLL, 1e3 * max(1e-3, deadline - time.monotonic()))):
        raise StallError("A rank sent nothing in time.")


# How the members of a process set agree when all of them make the same call, which must be fast.
#
# Each member sends a digest of its oldest pending call, its state (active, joined or failed), the call's count, and the
# call's payload. A payload is data small enough to be sent with the agreement, so that a small reduction costs one
# exchange instead of two. If all members are active and all digests are equal, the call runs. Otherwise the members
# exchange all their pending calls; see `match` in matching.py.
#
# Equal messages are sent as one. Times always differ, so the members exchange them after the calls,
# and only if the member that writes a timeline has asked for them. Then an agreement of n members costs each of them
# log2(n) messages and O(log n) bytes, unless payloads, counts or calls differ.

ACTIVE, JOINED, FAILED = range(3)
_MESSAGE = struct.Struct("<16sB?6xq")
"""Digest, state, whether to exchange times, the call's count."""
_TIME = struct.Struct("<q")
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
    payloads: tuple[bytes, ...] = ()
    """Every member's payload, b"" if it has sent none. () if the members have exchanged all their pending calls."""
    error: str | None = None
    """The message of the error that the members in `raising` raise."""
    raising: frozenset[int] = frozenset()
    """Places of the members that raise `error`."""
    steps_differ: bool = False
    """Whether members may have made different calls in this training step."""
    arrivals: tuple[int, ...] = ()
    """When each member made its call, in nanoseconds since the epoch by its own clock. Empty if nobody needs it."""


T = TypeVar("T")

Execute = Callable[[Group, Verdict], T]
"""Moves the data of a call over the group, after the agreement; returns the result."""


@functools.cache
def payload_capacity(size: int, most: int = _PAYLOAD_BYTES) -> int:
    """Return how many bytes of payload each of `size` members may send with a call, at most `most`."""
    return min(most, _PAYLOAD_BYTES_OF_ALL // size)


def agree(connections: Connections, state: int, call: Call, issued: int, *, needs_times: bool = False) -> Verdict:
    """Return the verdict if all members are ACTIVE with the same call, else one without a call. Collective.

    issued: as in PendingCall. needs_times: whether this member needs `Verdict.arrivals`; it may differ between members.
    """
    digest, size = _digest(call.identity), connections.size
    message = _MESSAGE.pack(digest, state, needs_times, call.count)
    messages = connections.allgather_messages(message + call.payload)
    if state == ACTIVE and not needs_times and messages.count(messages[0]) == size:
        return Verdict(call, counts=(call.count,) * size, payloads=(call.payload,) * size)
    digests, states, asked, counts = zip(*map(_MESSAGE.unpack_from, messages), strict=True)
    arrivals: tuple[int, ...] = ()
    if any(asked):
        times = connections.allgather_messages(_TIME.pack(issued))
        arrivals = tuple([time for message in times for (time,) in [_TIME.unpack(message)]])
    if set(states) == {ACTIVE} and set(digests) == {digest}:
        payloads = tuple([other[_MESSAGE.size :] for other in messages])
        return Verdict(call, counts=counts, payloads=payloads, arrivals=arrivals)
    return Verdict(None, arrivals=arrivals)


@functools.lru_cache(maxsize=1024)
def _digest(identity: Hashable) -> bytes:
    """Return a digest of `Call.identity`. Unequal ones have other digests."""
    return hashlib.blake2b(repr(identity).encode(), digest_size=16).digest()
