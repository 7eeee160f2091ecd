"""Counts what an agreement and the start of a world cost each rank, for worlds of 64 to 16,384 ranks. A model.

    python benchmarks/scale.py

The agreement before each collective (dualdist/agreement): up to --driven ranks, the package's own code runs, one thread
per rank, over a network in memory that counts. For larger worlds the figures are computed from the rounds of that code,
by formulas that are checked against every world that ran. Mostly all ranks send equal messages. In the last column, all
messages differ, as before an allgather of another length on each rank. The time of an agreement is its rounds times the
latency of a message, without the time of its bytes.

The start of a world: see scale_start.py. It runs with up to --started ranks; larger worlds are computed from lines
fitted to these. Backends are not in the model.

Rows marked `*` are computed.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from scale_start import print_starts

from dualdist.agreement import call_kinds
from dualdist.agreement.call import Call
from dualdist.agreement.connections import _HEADER, Connections, _Peer
from dualdist.agreement.verdict import _MESSAGE, ACTIVE, Entry, agree

SIZES = (64, 256, 1024, 4096, 16384)
SECONDS = 300.0
OTHER_DESCRIPTORS = 2
"""Of a rank in a world of any size: its connection to the job's store, and the socket on which it answers questions
about its state (dualdist/agreement/watch.py)."""


class Counts(NamedTuple):
    """Of one rank and one agreement."""

    descriptors: int
    """Without those of the backend and of shared memory."""
    rounds: int
    messages: int
    """Sent in one piece."""
    sent: int
    """Bytes."""


class Pipe:
    """One direction of a connection in memory, in place of a socket."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.data = bytearray()
        self.messages = self.sent = 0

    def put(self, data: memoryview) -> None:
        with self.changed:
            self.data += data
            self.messages += 1
            self.sent += len(data)
            self.changed.notify_all()

    def take(self, count: int) -> bytes:
        with self.changed:
            if not self.data:
                raise BlockingIOError
            taken = bytes(self.data[:count])
            del self.data[:count]
            return taken


class MemorySocket:
    """What `_Peer` uses of a socket."""

    def __init__(self, outgoing: Pipe, incoming: Pipe) -> None:
        self.outgoing, self.incoming = outgoing, incoming

    def send(self, message: memoryview) -> int:
        self.outgoing.put(message)
        return len(message)

    def recv(self, count: int) -> bytes:
        return self.incoming.take(count)


class MemoryPeer(_Peer):
    """A peer that is reached over memory."""

    def __init__(self, connection: MemorySocket) -> None:
        self.socket: Any = connection
        self._unread = bytearray()

    def wait(self, deadline: float) -> None:
        incoming = self.socket.incoming
        with incoming.changed:
            assert incoming.changed.wait_for(lambda: incoming.data, SECONDS)


class MemoryConnections(Connections):
    """The connections of one rank, over memory. pipes: (from, to) -> Pipe, of all ranks."""

    def __init__(self, pipes: dict[tuple[int, int], Pipe], rank: int, size: int) -> None:
        self._pipes = pipes
        super().__init__(None, "model", range(size), rank, "", SECONDS)

    def _connect(self, *_: Any) -> None:
        for peer in peers_of(self.rank, self.size):
            ways = ((self.rank, peer), (peer, self.rank))
            self._peers[peer] = MemoryPeer(
                MemorySocket(*(self._pipes.setdefault(way, Pipe()) for way in ways))
            )

    def counts(self) -> Counts:
        outgoing = [self._pipes[self.rank, peer] for peer in self._peers]
        messages = sum(pipe.messages for pipe in outgoing)
        descriptors = len(self._peers) + OTHER_DESCRIPTORS
        return Counts(descriptors, len(self._rounds), messages, sum(pipe.sent for pipe in outgoing))


def peers_of(rank: int, size: int) -> set[int]:
    """Return the peers that Connections._connect connects to."""
    return {(rank + sign * (1 << bit)) % size for bit in range((size - 1).bit_length()) for sign in (-1, 1)}


def on_all_ranks(size: int, run: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def driven_agreement(size: int, *, differ: bool = False) -> Counts:
    """Let `size` ranks agree on a call. Return the largest counts of a rank. differ: whether all messages do."""
    pipes: dict[tuple[int, int], Pipe] = {}
    connections = [MemoryConnections(pipes, rank, size) for rank in range(size)]
    calls = [Call(call_kinds.ALLGATHER, count=rank * differ) for rank in range(size)]
    verdicts = on_all_ranks(size, lambda rank: agree(connections[rank], Entry(ACTIVE, calls[rank])))
    assert all(verdict.call is call for verdict, call in zip(verdicts, calls, strict=True))
    return Counts(*map(max, zip(*(held.counts() for held in connections), strict=True)))


def computed_agreement(size: int, *, differ: bool = False) -> Counts:
    """Return the counts from the rounds of Connections.allgather_messages."""
    rounds = (size - 1).bit_length()
    texts = size - 1 if differ else rounds
    descriptors = len(peers_of(0, size)) + OTHER_DESCRIPTORS
    return Counts(descriptors, rounds, rounds, texts * (_HEADER.size + _MESSAGE.size))


def main() -> None:
    parser = argparse.ArgumentParser(description="Count what an agreement and a start cost each rank.")
    parser.add_argument("--driven", type=int, default=256, help="the largest world that runs (%(default)s)")
    parser.add_argument("--latency", type=float, default=50.0, help="of a message, in us (%(default)s)")
    parser.add_argument(
        "--started", type=int, default=128, help="the ranks of the largest start that runs (%(default)s)"
    )
    settings = parser.parse_args()
    if settings.started < 16:
        parser.error("--started must be at least 16")
    print("An agreement, per rank")
    print("    ranks  descriptors  rounds  messages     bytes  us of latency  bytes if all differ")
    for size in SIZES:
        counts, largest = computed_agreement(size), computed_agreement(size, differ=True)
        is_driven = size <= settings.driven
        assert not is_driven or driven_agreement(size) == counts
        assert not is_driven or driven_agreement(size, differ=True) == largest
        print(
            f"{size:9}{' ' if is_driven else '*'}{counts.descriptors:11}{counts.rounds:8}{counts.messages:10}"
            f"{counts.sent:10}{counts.rounds * settings.latency:15.0f}{largest.sent:21}"
        )
    first, last = computed_agreement(64), computed_agreement(4096)
    ratios = (
        f"{name} {large / small:.1f}" for name, small, large in zip(Counts._fields, first, last, strict=True)
    )
    print(f"4096 ranks over 64: {', '.join(ratios)}")
    started = [settings.started >> halvings for halvings in (3, 2, 1, 0)]
    print_starts(started, [size for size in SIZES if size > settings.started], settings.latency / 1e6)


if __name__ == "__main__":
    main()
