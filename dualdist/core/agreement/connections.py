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
import hmac
import itertools
import json
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...errors import HorovodInternalError, StallError
from ..checks import shown_ranks
from ..meeting.boards import rising
from ..meeting.server import connected
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


# How the members of a process set learn each other's addresses, and that one of them cannot connect.

_POLL_SECONDS = (0.005, 0.2)
"""The first and the longest pause between two questions. Thousands of members may ask one store."""


class AddressExchange:
    """Where the members of a process set publish their addresses: c10d's Store. When one fails, all raise its error."""

    def __init__(
        self,
        store: Any,
        key: str,
        ranks: Sequence[int],
        place: int,
        timeout: float,
        check_start: Callable[[BaseException | None], None] = lambda cause: None,
    ) -> None:
        """Prepare. Local.

        ranks: global ranks of the members. place: of this process among them. timeout: seconds for all calls.
        check_start: raises HorovodInternalError if a rank of the world has ended during its start. Its argument is
        the error of this rank that such an end may have caused, or None.
        """
        self._store = store
        self._key = key
        self._ranks = ranks
        self._place = place
        self._timeout = timeout
        self._check_start = check_start
        self._deadline = time.monotonic() + timeout

    def publish(self, host: str, port: int, token: bytes) -> None:
        """Publish the address of this process, and the token with which others must call it."""
        self._store.set(f"{self._key}/{self._place}", json.dumps([host, port, token.hex()]))

    def wait_for(self, places: Iterable[int]) -> dict[int, tuple[str, int, bytes]]:
        """Return what the members at `places` have published. Waits for them. Raises HorovodInternalError."""
        missing = sorted(places)
        keys = [f"{self._key}/{place}" for place in missing]
        pauses = rising(*_POLL_SECONDS)
        # Not Store.wait: after a timeout, TCPStore prints warnings.
        while not self._store.check(keys):
            self.check(
                place for place, key in zip(missing, keys, strict=True) if not self._store.check([key])
            )
            time.sleep(next(pauses))
        endpoints = map(json.loads, self._store.multi_get(keys))
        return {
            place: (host, port, bytes.fromhex(token))
            for place, (host, port, token) in zip(missing, endpoints, strict=True)
        }

    def left(self) -> float:
        """Return how many seconds are left, at least 1 ms."""
        return _left(self._deadline)

    def check(self, missing: Iterable[int]) -> None:
        """Raise HorovodInternalError when another member has failed, or when the time is over.

        missing: the places of the members for which this process waits.
        """
        if self._store.check([f"{self._key}/failure"]):
            raise HorovodInternalError(self._store.get(f"{self._key}/failure").decode())
        self._check_start(None)
        if time.monotonic() > self._deadline:
            raise self.failure(missing, TimeoutError(f"nothing arrived for {self._timeout:g} s"))

    def failure(self, missing: Iterable[int], cause: OSError | RuntimeError) -> HorovodInternalError:
        """Return the error of a member that cannot connect to those at `missing`, after sending it to the others.

        If another has failed already, return its error. Raises HorovodInternalError if `cause` is the end of a rank.
        """
        self._check_start(cause)
        ranks = sorted(self._ranks[place] for place in missing)
        text = (
            f"Rank {self._ranks[self._place]} could not connect to {shown_ranks(ranks)} of {list(self._ranks)}: "
            f"{cause}. Look at their output."
        )
        # Without the store, rank 0 has ended.
        with contextlib.suppress(RuntimeError):
            if self._store.check([f"{self._key}/failure"]):
                text = self._store.get(f"{self._key}/failure").decode()
            else:
                self._store.set(f"{self._key}/failure", text)
        return HorovodInternalError(text)


_CONNECT_SECONDS = 5.0
_CHECK_SECONDS = 0.5
"""How often a rank that waits for connections looks whether another one has failed."""
_TOKEN_BYTES = 16
_LONGEST_POLL = 2**31 - 1
"""The longest timeout of poll(2): milliseconds in a C int."""
_READ_BYTES = 1 << 16


class Connections:
    """The connections of one member to its peers."""

    def __init__(
        self,
        store: Any,
        name: str,
        ranks: Sequence[int],
        rank: int,
        address: str,
        timeout: float,
        connect_timeout: float | None = None,
        check_start: Callable[[BaseException | None], None] = lambda cause: None,
    ) -> None:
        """Connect to the peers. Collective over `ranks`; a rank that is not a member gets no connections.

        Args:
            store: c10d's Store, where the members publish their addresses under `name`.
            ranks: global ranks of the members.
            rank: the global rank of this process.
            address: the IPv4 address at which the other members reach this process.
            timeout: seconds to wait for the other members in each exchange.
            connect_timeout: seconds to wait for their connections; None: the same.
            check_start: as for AddressExchange.

        Raises:
            HorovodInternalError: a peer cannot be reached.
        """
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank) if rank in self.ranks else -1
        """This process's place among the members; -1 when it is not a member."""
        self.size = len(self.ranks)
        self._timeout = timeout
        self._peers: dict[int, _Peer] = {}
        if self.rank >= 0 and self.size > 1:
            limit = timeout if connect_timeout is None else connect_timeout
            exchange = AddressExchange(
                store, f"connections/{name}", self.ranks, self.rank, limit, check_start
            )
            self._connect(exchange, address)
        self._rounds: list[tuple[int, _Peer, _Peer]] = []
        """For each round of an exchange: of how many members to send, to which peer, and from which peer to receive."""
        for distance in _powers_of_two(self.size) if self.rank >= 0 else ():
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

    def has_lost_peer(self) -> bool:
        """Return whether a peer has died, or has closed its connections because of a failure. Local."""
        return any(peer.has_left(GOODBYE) is False for peer in list(self._peers.values()))

    def peers_that_succeeded(self) -> list[int]:
        """Return the global ranks of the peers that have left the world, but not because of an exception. Local."""
        return [self.ranks[place] for place, peer in sorted(self._peers.items()) if peer.has_left(SUCCESS)]

    def say_goodbye(self) -> None:
        """Let `has_lost_peer` be false on the peers when this process closes its connections. Local."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.send(memoryview(GOODBYE if has_failed() else SUCCESS))

    def close(self) -> None:
        """Close the connections. Local."""
        for peer in self._peers.values():
            peer.close()
        self._peers = {}  # the sockets of `_rounds` are closed: an exchange raises

    def abandon(self) -> None:
        """In a forked process, close its copies of the sockets. The parent's connections stay open. Local."""
        for peer in self._peers.values():
            peer.socket.close()

    def _connect(self, exchange: AddressExchange, address: str) -> None:
        steps = [step for distance in _powers_of_two(self.size) for step in (-distance, distance)]
        peers = {(self.rank + step) % self.size for step in steps}
        token = secrets.token_bytes(_TOKEN_BYTES)
        with (
            contextlib.ExitStack() as stack,
            socket.create_server((address, 0), backlog=len(peers)) as server,
        ):
            try:
                exchange.publish(address, server.getsockname()[1], token)
                called = {
                    peer: stack.enter_context(self._call(*where))
                    for peer, where in exchange.wait_for(peers).items()
                    if peer > self.rank
                }
                # Before the replies: a peer replies when its own calls are made.
                self._accept(server, token, peers - called.keys(), exchange)
                for peer, connection in called.items():
                    _check_reply(connection, exchange)
                    self._peers[peer] = _Peer(connection)
                stack.pop_all()
            except HorovodInternalError:
                self.close()
                raise
            except (OSError, RuntimeError) as error:
                failure = exchange.failure(peers - self._peers.keys(), error)
                self.close()
                raise failure from error

    def _call(self, host: str, port: int, token: bytes) -> socket.socket:
        """Connect to the peer that listens at `host`. It need not have accepted the connection yet."""
        with contextlib.ExitStack() as stack:
            try:
                connection = stack.enter_context(connected(host, port, _CONNECT_SECONDS))
                connection.sendall(token + self.rank.to_bytes(4, "little"))
            except OSError as error:
                raise OSError(f"{host}:{port}: {error}") from error
            stack.pop_all()
        return connection

    def _accept(
        self, server: socket.socket, token: bytes, callers: set[int], exchange: AddressExchange
    ) -> None:
        while missing := callers - self._peers.keys():
            server.settimeout(min(_CHECK_SECONDS, exchange.left()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                exchange.check(missing)
                continue
            connection.settimeout(_CONNECT_SECONDS)
            hello = b""
            with contextlib.suppress(OSError):
                hello = connection.recv(_TOKEN_BYTES + 4, socket.MSG_WAITALL)
            if not hmac.compare_digest(hello[:_TOKEN_BYTES], token):  # not a member
                connection.close()
                continue
            connection.sendall(b"\1")
            self._peers[int.from_bytes(hello[_TOKEN_BYTES:], "little")] = _Peer(connection)


class _Peer:
    """The connection to one peer. A peer may be one exchange ahead; its bytes are kept here until they are needed."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self.socket = connection
        self._unread = bytearray()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def has_left(self, goodbye: bytes) -> bool | None:
        """Return whether `goodbye` is the last that the peer has sent; None if it has not closed the connection."""
        last = b""
        try:
            poll = select.poll()
            poll.register(self.socket, select.POLLRDHUP)
            if not poll.poll(0):
                return None
            last = self.socket.recv(_READ_BYTES, socket.MSG_PEEK)
        except ValueError:  # this process has closed the socket
            return False
        except OSError:  # the peer has not read everything; its goodbye may have arrived before
            pass
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

    def close(self) -> None:
        # shutdown() wakes the threads that wait for the peer, also those of forked processes.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _left(deadline: float) -> float:
    """Return how many seconds are left, at least 1 ms: a timeout of 0 makes a socket non-blocking."""
    return max(1e-3, deadline - time.monotonic())


def _check_reply(connection: socket.socket, exchange: AddressExchange) -> None:
    """Wait for the reply to a call. Raises OSError without one: a listener that accepts the token is the peer."""
    host, port = connection.getpeername()
    connection.settimeout(exchange.left())
    if not connection.recv(1):
        raise OSError(f"{host}:{port}: another program listens at this address")


def _powers_of_two(limit: int) -> list[int]:
    return [1 << bit for bit in range((limit - 1).bit_length())]


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
