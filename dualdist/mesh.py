"""Sockets between the members of a process set, for the few bytes on which they agree before each collective.

An agreement must cost little beside the collective that it guards. An engine's own small collective wakes two or three
threads on every side; here the calling thread writes and reads by itself. Members talk to those whose place differs
by a power of two, so that n members need log2(n) rounds (Bruck et al. 1997, "Efficient algorithms for all-to-all
communications in multiport message-passing systems", section 3) and a process holds 2 log2(n) connections. It is one
and the same on every engine. A peer that dies is noticed at once, by the end of its connection.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from .errors import HorovodInternalError, StallError

__all__ = ("Mesh",)

_CONNECT_SECONDS = 5.0
_TOKEN_BYTES = 16
_LONGEST_POLL = 2**31 - 1
"""Milliseconds, as a C int."""


class Mesh:
    """The connections of one member to its peers."""

    def __init__(
        self, store: Any, name: str, ranks: Sequence[int], rank: int, address: str, timeout: float
    ) -> None:
        """Connect to the peers. Collective over `ranks`, which are global; a rank that is not among them holds none.

        store: c10d's Store, where the members find each other under `name`. address: where the others reach this
        process. timeout: seconds to wait in an exchange.
        Raises HorovodInternalError when a peer cannot be reached.
        """
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank) if rank in self.ranks else -1
        """Our place among the members."""
        self.size = len(self.ranks)
        self._timeout = timeout
        self._peers: dict[int, socket.socket] = {}
        if self.rank >= 0 and self.size > 1:
            self._connect(store, f"mesh/{name}", address)

    def exchange(self, message: bytes) -> list[bytes]:
        """Return every member's `message`, all of the same length, in rank order. Collective over the members.

        Raises StallError when a member does not come in time, HorovodInternalError when one has left.
        """
        blocks = [message]  # that of the member j places on at j
        deadline = time.monotonic() + self._timeout
        for distance in _powers_of_two(self.size):
            count = min(distance, self.size - distance)
            target = self._peers[(self.rank - distance) % self.size]
            source = self._peers[(self.rank + distance) % self.size]
            received = _swap(target, b"".join(blocks[:count]), source, count * len(message), deadline)
            blocks += [
                received[start : start + len(message)] for start in range(0, len(received), len(message))
            ]
        return [blocks[(place - self.rank) % self.size] for place in range(self.size)]

    def close(self) -> None:
        """Give the connections back. Local."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)  # whoever waits in it wakes, also a copy in a forked process
            peer.close()
        self._peers = {}

    def _connect(self, store: Any, key: str, address: str) -> None:
        steps = [step for distance in _powers_of_two(self.size) for step in (-distance, distance)]
        peers = {(self.rank + step) % self.size for step in steps}
        token, deadline = secrets.token_bytes(_TOKEN_BYTES), time.monotonic() + self._timeout
        with socket.create_server((address, 0), backlog=len(peers)) as server:
            store.set(f"{key}/{self.rank}", json.dumps([*server.getsockname(), token.hex()]))
            try:
                for peer in sorted(place for place in peers if place > self.rank):
                    store.wait([f"{key}/{peer}"], timedelta(seconds=_left(deadline)))
                    host, port, peers_token = json.loads(store.get(f"{key}/{peer}"))
                    self._peers[peer] = self._call(host, port, peers_token, deadline)
                self._accept(server, token, sum(place < self.rank for place in peers), deadline)
            except (OSError, RuntimeError) as error:
                self.close()
                raise HorovodInternalError(
                    f"Place {self.rank} of ranks {self.ranks} could not connect to its peers: {error}"
                ) from error
        for connection in self._peers.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)

    def _call(self, host: str, port: int, token: str, deadline: float) -> socket.socket:
        """Connect to the peer that listens at `host`: who knows its token and answers, it is."""
        with contextlib.ExitStack() as stack:
            try:
                connection = stack.enter_context(socket.create_connection((host, port), _CONNECT_SECONDS))
                connection.settimeout(_left(deadline))
                connection.sendall(bytes.fromhex(token) + self.rank.to_bytes(4, "little"))
                if not connection.recv(1):
                    raise OSError("somebody else listens there")
            except OSError as error:
                raise OSError(f"{host}:{port}: {error}") from error
            stack.pop_all()
        return connection

    def _accept(self, server: socket.socket, token: bytes, expected: int, deadline: float) -> None:
        while expected:
            server.settimeout(_left(deadline))
            connection, _ = server.accept()
            connection.settimeout(_CONNECT_SECONDS)
            hello = b""
            with contextlib.suppress(OSError):
                hello = connection.recv(_TOKEN_BYTES + 4, socket.MSG_WAITALL)
            if not hmac.compare_digest(hello[:_TOKEN_BYTES], token):  # not one of us
                connection.close()
                continue
            connection.sendall(b"\1")
            self._peers[int.from_bytes(hello[_TOKEN_BYTES:], "little")] = connection
            expected -= 1


def _left(deadline: float) -> float:
    """Return how many seconds are left; at least a moment, since 0 stands for no waiting at all."""
    return max(1e-3, deadline - time.monotonic())


def _powers_of_two(limit: int) -> Iterator[int]:
    distance = 1
    while distance < limit:
        yield distance
        distance *= 2


def _swap(
    target: socket.socket, message: bytes, source: socket.socket, length: int, deadline: float
) -> bytes:
    """Send `message` to `target` while receiving `length` bytes from `source`; they may be the same."""
    parts: list[bytes] = []
    unsent, missing = memoryview(message), length
    try:
        while True:
            if unsent:
                with contextlib.suppress(BlockingIOError):
                    unsent = unsent[target.send(unsent) :]
            if not unsent and not missing:
                return b"".join(parts)
            if missing:
                with contextlib.suppress(BlockingIOError):
                    part = source.recv(missing)
                    if not part:
                        raise HorovodInternalError("a rank has left")
                    parts.append(part)
                    missing -= len(part)
                    continue
            _wait(target if unsent else None, source if missing else None, deadline)
    except (OSError, ValueError) as error:  # ValueError: closed by this process meanwhile
        raise HorovodInternalError(f"the connection to a rank was lost: {error}") from error


def _wait(writable: socket.socket | None, readable: socket.socket | None, deadline: float) -> None:
    poll = select.poll()
    if readable is not None:
        poll.register(readable, select.POLLIN)
    if writable is not None:
        poll.register(writable, select.POLLOUT | (select.POLLIN if writable is readable else 0))
    if not poll.poll(min(_LONGEST_POLL, 1e3 * _left(deadline))):
        raise StallError("A rank did not come in time.")
