"""Unix sockets between the members of a group, by which they wait for each other and notice dead ones.

In a barrier, each member signals the members at distances 1, 2, 4, ... and waits for as many (the dissemination barrier
of Hensgen, Finkel and Manber 1988, "Two algorithms for barrier synchronization"). A waiting member sleeps in poll(2),
which costs no CPU time on a host with more processes than cores. The kernel closes the sockets of a process that dies.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import HorovodInternalError

__all__ = ("ADDRESS_BYTES", "Mesh")

ADDRESS_BYTES = 16
_HELLO = struct.Struct("<i?")
"""The first message on a connection: the caller's place, and whether it only asks for the memory."""
_CREDENTIALS = struct.Struct("3i")
"""Process ID, user ID and group ID of the peer, in SO_PEERCRED."""


class Mesh:
    """The sockets of one member. Places are indices in the group."""

    def __init__(self, ranks: Sequence[int], place: int, timeout: float) -> None:
        """Listen. Local. ranks: of all members, for errors. timeout: of `connect`, in seconds."""
        self._ranks, self._place, self._size, self._timeout = ranks, place, len(ranks), timeout
        size = len(ranks)
        self._steps = [1 << bit for bit in range((size - 1).bit_length())]
        self._peers: dict[int, socket.socket] = {}
        self._is_closed = False
        self.address = secrets.token_bytes(ADDRESS_BYTES)
        """Where this member listens: a random name in Linux's abstract namespace, which leaves no file."""
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(_name(self.address))
        self._server.listen(2 * size)

    def connect(self, addresses: list[bytes], descriptor: int | None) -> int:
        """Connect to the other members and return the descriptor of the memory. Collective.

        descriptor: that of place 0, which it passes to all; None on the others. Raises OSError.
        """
        steps = {(self._place + sign * step) % self._size for step in self._steps for sign in (-1, 1)}
        deadline = time.monotonic() + self._timeout
        for peer in sorted(place for place in steps if place > self._place):
            self._peers[peer] = self._call(addresses[peer], is_request=False)
        request = None if descriptor is not None else self._call(addresses[0], is_request=True)
        expected = sum(place < self._place for place in steps)
        expected += self._size - 1 if descriptor is not None else 0
        while expected:
            expected -= self._accept(deadline, descriptor)
        self._server.close()
        if request is not None:
            with request:
                _, (descriptor, *_), _, _ = socket.recv_fds(request, 1, 1)
        for connection in self._peers.values():
            connection.setblocking(False)
        assert descriptor is not None
        return descriptor

    def _call(self, address: bytes, *, is_request: bool) -> socket.socket:
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(self._timeout)
            connection.connect(_name(address))
            if not _is_own_user(connection):
                raise OSError("another user listens at a member's address")
            connection.sendall(_HELLO.pack(self._place, is_request))
            stack.pop_all()
        return connection

    def _accept(self, deadline: float, descriptor: int | None) -> bool:
        """Accept one connection. Return whether it is from a member."""
        self._server.settimeout(max(1e-3, deadline - time.monotonic()))
        connection, _ = self._server.accept()
        connection.settimeout(self._timeout)
        hello = connection.recv(_HELLO.size, socket.MSG_WAITALL) if _is_own_user(connection) else b""
        if len(hello) < _HELLO.size:
            connection.close()
            return False
        place, is_request = _HELLO.unpack(hello)
        if not is_request:
            self._peers[place] = connection
            return True
        assert descriptor is not None
        with connection:
            socket.send_fds(connection, [b"\0"], [descriptor])
        return True

    @property
    def is_pair(self) -> bool:
        """Whether there are two members."""
        return self._size == 2

    def barrier(self) -> Iterator[socket.socket]:
        """Meet the other members; yield the socket for whose data to wait next, until it has arrived.

        Raises HorovodInternalError when a member has left.
        """
        for step in self._steps:
            self._signal((self._place + step) % self._size)
            source = (self._place - step) % self._size
            while not self._has_signal(source):
                yield self._peers[source]

    def _signal(self, place: int) -> None:
        try:
            self._peers[place].send(b"\0", socket.MSG_NOSIGNAL)
        except (OSError, KeyError) as error:
            raise self._left(place) from error

    def _has_signal(self, place: int) -> bool:
        try:
            if self._peers[place].recv(1):
                return True
        except BlockingIOError:
            return False
        except (OSError, KeyError) as error:
            raise self._left(place) from error
        raise self._left(place)

    def check(self) -> None:
        """Raise HorovodInternalError if a member has left, or if this one has closed its connections. Local."""
        poll = select.poll()
        places = {peer.fileno(): place for place, peer in self._peers.items()}
        for descriptor in places:
            poll.register(descriptor, select.POLLRDHUP)
        for descriptor, _ in poll.poll(0):
            raise self._left(places[descriptor])
        if self._is_closed:
            raise HorovodInternalError("the connections to the other ranks of this host are closed")

    def _left(self, place: int) -> HorovodInternalError:
        return HorovodInternalError(f"rank {self._ranks[place]} has left")

    def close(self) -> None:
        """Close the connections. The other members notice it. Local."""
        self._is_closed = True
        self._server.close()
        for peer in self._peers.values():
            # shutdown() wakes the threads that wait for the peer, also those of forked processes.
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()
        self._peers = {}

    def abandon(self) -> None:
        """In a forked process, close its copies of the sockets. The parent's connections stay open. Local."""
        for peer in self._peers.values():
            peer.close()


def _name(address: bytes) -> str:
    return f"\0dualdist-{address.hex()}"


def _is_own_user(connection: Any) -> bool:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(data)[1] == os.geteuid())
