"""Connections between processes that know each other's addresses: TCP, or Unix sockets within a host. Imports no torch.

A process listens at one address while its world lasts, and the gather of the start carries the addresses of all ranks
(core/backends/store.py). So any ranks can connect at any time, without another exchange.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from ...errors import HorovodInternalError
from ..checks import shown_ranks
from .server import connected, is_foreign, listener_at

_CONNECT_SECONDS = 5.0
_CHECK_SECONDS = 0.5
"""How often a member that waits for calls looks whether another one has failed."""
_TOKEN_BYTES = 16
_LONGEST_CALL = 1 << 10


class Address(NamedTuple):
    """Where a process listens, and the token with which others must call it."""

    host: str
    port: int
    token: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}".lstrip("\0")


class Listener:
    """Where this process takes the calls of others. A call names what it is for, and waits until that is wanted."""

    def __init__(self, host: str = "") -> None:
        """Listen. Local. host: the IPv4 address at which others reach this process; "": a Unix socket of this host."""
        token = secrets.token_hex(_TOKEN_BYTES)
        # A random name in Linux's abstract namespace leaves no file (unix(7)).
        self._socket = listener_at(host or f"\0dualdist-{token}", 0)
        self._socket.setblocking(False)
        port = self._socket.getsockname()[1] if host else 0
        self.address = Address(host or f"\0dualdist-{token}", port, token)
        self.ranks: Sequence[Address] = ()
        """The addresses of all ranks of the world, in their order."""
        self._selector = selectors.PollSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._calls: dict[tuple[str, int], socket.socket] = {}
        """What a call is for and the caller's place -> its connection."""
        self._lock = threading.Lock()

    def take(self, name: str, seconds: float) -> dict[int, socket.socket]:
        """Return the calls for `name`, by the caller's place. Waits up to `seconds` for any call. Raises OSError."""
        with self._lock:
            for key, _ in self._selector.select(0 if self._named(name) else seconds):
                connection = cast(socket.socket, key.fileobj)
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    if connection is self._socket:
                        connection, _ = self._socket.accept()
                        connection.setblocking(False)
                        self._selector.register(connection, selectors.EVENT_READ)
                    else:
                        self._selector.unregister(connection)
                        self._read(connection)
            return {key[1]: self._calls.pop(key) for key in self._named(name)}

    def _named(self, name: str) -> list[tuple[str, int]]:
        return [key for key in self._calls if key[0] == name]

    def _read(self, connection: socket.socket) -> None:
        """Keep a connection whose call has arrived, in one piece since it is short. Close that of a stranger."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            token, _, call = connection.recv(_LONGEST_CALL).partition(b" ")
            if hmac.compare_digest(token, self.address.token.encode()) and not is_foreign(connection):
                place, _, name = call.decode().partition(" ")
                self._calls[name, int(place)] = connection
                stack.pop_all()

    def close(self) -> None:
        """Refuse calls from now on. Local, also in a forked process, for its copies of the sockets."""
        for key in list(self._selector.get_map().values()):
            cast(socket.socket, key.fileobj).close()
        for connection in self._calls.values():
            connection.close()
        self._calls = {}


class Links:
    """The connections of one member with those whose places differ from its own by a power of two, in a circle."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        """ranks: global ranks of the members. rank: that of this process."""
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank) if rank in self.ranks else -1
        """This process's place among the members; -1 when it is not a member."""
        self.size = len(self.ranks)
        self.steps = [1 << bit for bit in range((self.size - 1).bit_length())]
        self.sockets: dict[int, socket.socket] = {}
        """The connection to each peer, by its place."""

    def connect(
        self,
        listener: Listener,
        addresses: Sequence[Address],
        name: str,
        seconds: float,
        check: Callable[[BaseException | None], object] = lambda cause: None,
    ) -> None:
        """Connect to the peers. Collective over the members. addresses: of all members.

        name: the same on all members, and used once. seconds: to wait for the others. check: raises
        HorovodInternalError if another rank has failed. Its argument is the error that this may have caused, or None.

        Raises HorovodInternalError if a peer cannot be reached.
        """
        deadline = time.monotonic() + seconds
        peers = {(self.rank + sign * step) % self.size for step in self.steps for sign in (-1, 1)}
        called = dict.fromkeys(sorted(peer for peer in peers if peer > self.rank))
        made: dict[int, socket.socket] = {}
        missing: Sequence[int] = ()
        with contextlib.ExitStack() as stack:
            try:
                for peer in called:
                    missing = [peer]
                    made[peer] = stack.enter_context(_call(addresses[peer], self.rank, name))
                # Before the replies: a peer replies when its own calls are made.
                while missing := sorted(peers - called.keys() - made.keys()):
                    left = deadline - time.monotonic()
                    if left < 0:
                        raise TimeoutError(f"nothing arrived for {seconds:g} s")
                    for peer, connection in listener.take(name, min(_CHECK_SECONDS, left)).items():
                        made[peer] = stack.enter_context(connection)
                        connection.send(b"\1")
                    check(None)
                for peer in called:
                    missing = [peer]
                    made[peer].settimeout(max(1e-3, deadline - time.monotonic()))
                    if not made[peer].recv(1):
                        raise OSError(f"{addresses[peer]}: another program listens at this address")
            except OSError as error:
                check(error)
                others = shown_ranks([self.ranks[place] for place in missing])
                raise HorovodInternalError(
                    f"Rank {self.ranks[self.rank]} could not connect to {others} of {list(self.ranks)}: {error}. Look "
                    "at their output."
                ) from error
            stack.pop_all()
        for connection in made.values():
            connection.setblocking(False)
        self.sockets = made

    def hung_up(self) -> list[int]:
        """Return the places of the peers whose connection is closed, at either end. Local."""
        poll, places = select.poll(), {}
        for place, connection in list(self.sockets.items()):
            if (descriptor := connection.fileno()) < 0:  # another thread closes the links
                return [place]
            poll.register(descriptor, select.POLLRDHUP)
            places[descriptor] = place
        return [places[descriptor] for descriptor, _ in poll.poll(0)]

    def close(self) -> None:
        """Close the connections. The peers notice it. Local."""
        for connection in self.sockets.values():
            # shutdown() wakes the threads that wait for the peer, also those of forked processes.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self.sockets = {}

    def abandon(self) -> None:
        """In a forked process, close its copies of the sockets. The parent's connections stay open. Local."""
        for connection in self.sockets.values():
            connection.close()


def _call(address: Address, place: int, name: str) -> socket.socket:
    """Connect to a listener, which need not have accepted the connection yet. Raises OSError."""
    with contextlib.ExitStack() as stack:
        try:
            connection = stack.enter_context(connected(*address[:2], _CONNECT_SECONDS))
            if is_foreign(connection):
                raise OSError("another user listens at a member's address")
            connection.sendall(f"{address.token} {place} {name}".encode())
        except OSError as error:
            raise OSError(f"{address}: {error}") from error
        stack.pop_all()
    return connection
