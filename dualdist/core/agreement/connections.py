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
import itertools
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence

from ...errors import HorovodInternalError, StallError
from ..meeting.links import Links, Listener
from ..process_exit import has_failed

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

        Args:
            listener: of this process; None in a world of one.
            name: the same on all members, and used once.
            ranks: global ranks of the members.
            rank: the global rank of this process.
            timeout: seconds to wait for the other members in each exchange.
            connect_timeout: seconds to wait for their connections; None: the same.
            check: as for Links.

        Raises:
            HorovodInternalError: a peer cannot be reached.
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
        if not self._poll.poll(min(_LONGEST_POLL, 1e3 * _left(deadline))):
            raise StallError("A rank sent nothing in time.")


def _left(deadline: float) -> float:
    """Return how many seconds are left, at least 1 ms: a timeout of 0 makes a socket non-blocking."""
    return max(1e-3, deadline - time.monotonic())


def _lost(error: OSError | ValueError) -> HorovodInternalError:
    """Return the error of an exchange. A ValueError means that another thread has closed a socket."""
    return HorovodInternalError(f"the connection to a rank was lost: {error}")


def _wait(writable: socket.socket, readable: socket.socket | None, deadline: float) -> None:
    poll = select.poll()
    if readable is not None:
        poll.register(readable, select.POLLIN)
    poll.register(writable, select.POLLOUT | (select.POLLIN if writable is readable else 0))
    if not poll.poll(min(_LONGEST_POLL, 1e3 * _left(deadline))):
        raise StallError("A rank sent nothing in time.")
