"""The links between the hosts of a world: round trips, clocks and bandwidths, for `dualdist doctor --world`.

One process of each host measures. It listens on the address that the others use, and connects to the hosts 1, 2, 4, ...
places after its own. In each round, first all links are asked for the time, then each host sends data to one host
after the other. While a host receives, it does not send: on a slow link, its data would delay the acknowledgements, and
the other direction would look slow, too.

A request is a length and as many bytes, and the answer to it is the time: without bytes it shows the round trip and the
clock, with many bytes the bandwidth. Any program may ask for the time, so no request needs a proof.
"""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import struct
import threading
import time
from dataclasses import asdict, dataclass, replace

from ..core.meeting.links import Gather
from ..core.meeting.server import connected


@dataclass(frozen=True)
class Link:
    """The connection from one host to another. source, target: places of the hosts.

    round_trip: seconds, the shortest of several. clock: by how many seconds the clock of `target` is ahead of that of
    `source`. bandwidth: bytes per second, from `source` to `target`. problem: why there is no connection.
    """

    source: int
    target: int
    round_trip: float | None = None
    clock: float | None = None
    bandwidth: float | None = None
    problem: str = ""


_LENGTH, _TIME = struct.Struct("!Q"), struct.Struct("!d")
_QUESTIONS, _ROUNDS = 20, 3
"""How often the time is asked for in a round, and how many rounds there are. The best counts: other programs take time.
The rounds of all links alternate, so that a program that runs for a second slows no link alone."""
_MEASURED_SECONDS = 0.1
_SILENCE_SECONDS = 5.0
"""How long to wait for the other host."""
_CHUNK = 1 << 16


class _Answers(socketserver.StreamRequestHandler):
    timeout = _SILENCE_SECONDS
    disable_nagle_algorithm = True

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while len(header := self.rfile.read(_LENGTH.size)) == _LENGTH.size:
                (left,) = _LENGTH.unpack(header)
                while left and (data := self.rfile.read(min(left, _CHUNK))):
                    left -= len(data)
                self.wfile.write(_TIME.pack(time.time()))


def measure_links(place: int | None, num_hosts: int, address: str, gather: Gather) -> list[Link]:
    """Return the links, the same list on every process. Collective.

    place: that of this host, if this process measures for it. address: the one at which other hosts reach this host.
    """
    steps = [1 << power for power in range((num_hosts - 1).bit_length())]
    with contextlib.ExitStack() as stack:
        port = None
        if place is not None:
            server = stack.enter_context(socketserver.ThreadingTCPServer((address, 0), _Answers))
            server.daemon_threads, port = True, server.server_address[1]
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            stack.callback(server.shutdown)  # waits for the end of its loop
        ends = {end[0]: end[1:] for end in map(json.loads, gather(json.dumps([place, address, port])))}
        targets = [] if place is None else [(place + step) % num_hosts for step in steps]
        links = [Link(place or 0, target) for target in targets]
        for _ in range(_ROUNDS):
            links = [_ask(link, ends[link.target]) for link in links]
            gather("")
            for number, step in enumerate(steps):
                for turn in range(2):
                    if place is not None and place // step % 2 == turn:
                        links[number] = _send(links[number], ends[targets[number]])
                    gather("")
        texts = gather(json.dumps([asdict(link) for link in links]))
    return [Link(**link) for text in texts for link in json.loads(text)]


def _ask(link: Link, end: tuple[str, int]) -> Link:
    """Ask the target for the time, unless there is no connection. The answer that came soonest is the most exact."""
    if link.problem:
        return link
    try:
        with connected(*end, _SILENCE_SECONDS) as connection:
            best = min(_answer(connection, 0) for _ in range(_QUESTIONS))
    except OSError as error:
        return replace(link, problem=f"{end[0]}:{end[1]}: {error}")
    if link.round_trip is not None and link.round_trip <= best[0]:
        return link
    return replace(link, round_trip=best[0], clock=best[1])


def _send(link: Link, end: tuple[str, int]) -> Link:
    """Measure the bandwidth, unless there is no connection. The highest one measured so far counts."""
    if not link.problem:
        with contextlib.suppress(OSError), connected(*end, _SILENCE_SECONDS) as connection:
            length, seconds = _CHUNK, 0.0
            while seconds < _MEASURED_SECONDS:
                length *= 2
                seconds, _ = _answer(connection, length)
            return replace(link, bandwidth=max(link.bandwidth or 0.0, length / seconds))
    return link


def _answer(connection: socket.socket, length: int) -> tuple[float, float]:
    """Send `length` bytes. Return the seconds until the answer, and by how many the other clock is ahead."""
    sent_at, start = time.time(), time.perf_counter()
    connection.sendall(_LENGTH.pack(length))
    for _ in range(length // _CHUNK):
        connection.sendall(bytes(_CHUNK))
    answer = connection.recv(_TIME.size, socket.MSG_WAITALL)
    seconds = time.perf_counter() - start
    if len(answer) < _TIME.size:
        raise ConnectionResetError("the other host closed the connection")
    return seconds, _TIME.unpack(answer)[0] - sent_at - seconds / 2
