"""Measures the links between hosts: round trip, bandwidth, and the difference of the clocks at their ends.

One process of each host takes part. It listens on the address that the others use, and connects to the hosts 1, 2, 4,
... places after its own. First all links are asked for the time, 20 times each. Then each host sends data for a moment
to one host after the other, and the receiver counts the bytes. While a host receives, it does not send: on a slow link,
its data would delay the acknowledgements, and the other direction would look slow, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import secrets
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from .. import accelerator
from ..errors import ConfigurationError
from ..meeting import Gather, interface_of, own_node
from ..types import Launch

# What each process reports about itself and its host.

_GPUS, _DRIVER = Path("/proc/driver/nvidia/gpus"), Path("/proc/driver/nvidia/version")
_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""The limit of this process's control group (cgroup v2), in bytes or "max"."""


@dataclass(frozen=True)
class ProcessFacts:
    """One process, in the types of JSON."""

    rank: int
    node: str
    """A name that no other host has (own_node)."""
    host: str
    local_rank: int | None
    address: str
    """The IPv4 address at which the others reach this process."""
    interface: str
    versions: str
    """The digest of what `versions` returns."""
    backend: str
    """The backend that init() would choose, or the error that it would raise."""
    usable: bool
    """Whether init() could choose a backend."""
    devices: tuple[str, ...]
    """A name of each device that torch sees; the processes of a host use the same name for a device."""
    models: tuple[str, ...]
    """The model of each device that torch sees."""
    installed_gpus: int
    """The GPUs of the host that NVIDIA's driver lists, if torch was built for CUDA."""
    cpus: int
    threads: int
    memory: int
    """Bytes that the processes of the host may use."""
    shared_memory: int
    """Free bytes of /dev/shm."""
    open_files: int
    """How many files the process may open."""

    @classmethod
    def of_this_process(
        cls, launch: Launch, address: str, backend: str, usable: bool, found: Mapping[str, str]
    ) -> ProcessFacts:
        """Return the facts of this process. found: what `versions` returned."""
        devices = accelerator.visible()
        return cls(
            launch.rank,
            own_node(),
            socket.gethostname(),
            launch.local_rank,
            address,
            _interface(address),
            digest(found),
            backend,
            usable,
            devices,
            tuple(_model(index) for index in range(len(devices))),
            len(list(_GPUS.glob("*"))) if torch.version.cuda else 0,
            len(os.sched_getaffinity(0)),
            torch.get_num_threads(),
            _memory(),
            _free_shared_memory(),
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )

    def to_json(self) -> str:
        """Return the facts as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ProcessFacts:
        """Return the facts from which `to_json` made `text`."""
        facts = json.loads(text)
        return cls(**facts | {name: tuple(facts[name]) for name in ("devices", "models")})


def versions() -> dict[str, str]:
    """Return the version of Python, of torch's build, of NVIDIA's driver, and of every installed package. Local."""
    found: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        # A package without a name is the rest of an incomplete removal.
        name = package.metadata["Name"] if package.metadata else None
        if name:
            # Python imports the first one on its path.
            found.setdefault(name.lower().replace("_", "-"), package.version)
    found |= {"Python": platform.python_version(), "torch": torch.__version__}
    if _DRIVER.exists():
        found["NVIDIA driver"] = _DRIVER.read_text().partition("\n")[0]
    return found


def digest(found: Mapping[str, str]) -> str:
    """Return a short text that is the same for the same versions."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def _interface(address: str) -> str:
    with contextlib.suppress(ConfigurationError):
        return interface_of(address)
    return ""


def _model(index: int) -> str:
    kind = accelerator.kind()
    assert kind is not None  # there is a device
    return str(torch.get_device_module(kind).get_device_name(index))


def _memory() -> int:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        memory = min(memory, int(_MEMORY_LIMIT.read_text()))
    return memory


def _free_shared_memory() -> int:
    with contextlib.suppress(OSError):
        return shutil.disk_usage("/dev/shm").free
    return 0


_ASK, _SEND = b"A", b"S"
_HEADER = struct.Struct("!32scI")
"""(token, what follows, place of the sender)"""
_TIME = struct.Struct("!d")
_QUESTIONS = 20
_ROUNDS = 3
"""How often each link is measured. The best counts, because other programs take time of the CPUs."""
_WARM_UP_SECONDS, _MEASURED_SECONDS = 0.05, 0.2
_SILENCE_SECONDS = 5.0
"""How long to wait for the other host."""
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Link:
    """The connection from one host to another. source, target: places of the hosts."""

    source: int
    target: int
    round_trip: float | None = None
    """Seconds, the shortest of several; None without a connection."""
    clock: float | None = None
    """By how many seconds the clock of `target` is ahead of that of `source`."""
    bandwidth: float | None = None
    """Bytes per second from `source` to `target`."""
    problem: str = ""
    """Why there is no connection."""


def measure_links(place: int | None, num_hosts: int, address: str, gather: Gather) -> list[Link]:
    """Return the links, the same list on every process. Collective.

    place: that of this host, if this process measures for it. address: the one at which other hosts reach this host.
    """
    steps = [1 << power for power in range((num_hosts - 1).bit_length())]
    with _listening(place, address) as listener:
        ends = [
            json.loads(text) for text in gather(json.dumps([place, address, listener.port, listener.token]))
        ]
        peers = {end[0]: _Peer(*end[1:]) for end in ends if end[0] is not None}
        targets = [] if place is None else [(place + step) % num_hosts for step in steps]
        links = [_ask(place or 0, target, peers[target]) for target in targets]
        gather("")
        for number, step in enumerate(steps):
            # Data still in a queue delays the other direction, so the rounds of one direction follow each other.
            for sender in (*[0] * _ROUNDS, *[1] * _ROUNDS):
                if place is not None and place // step % 2 == sender and not links[number].problem:
                    _send(place, peers[targets[number]])
                gather("")
        texts = gather(json.dumps([place, [asdict(link) for link in links], listener.received]))
    reports = [report for report in map(json.loads, texts) if report[0] is not None]
    received = {(int(source), target): rate for target, _, rates in reports for source, rate in rates.items()}
    found = [Link(**link) for _, links, _ in reports for link in links]
    return [replace(link, bandwidth=received.get((link.source, link.target))) for link in found]


def clock_offsets(links: Sequence[Link], num_hosts: int) -> list[float | None]:
    """Return by how many seconds the clock of each host is ahead of that of host 0, None if no link leads to it."""
    clocks = {(link.source, link.target): link.clock for link in links}
    offsets: list[float | None] = [0.0]
    for place in range(1, num_hosts):
        # The link over the largest step that ends here without leaving the range.
        before = place - (1 << (place.bit_length() - 1))
        start, step = offsets[before], clocks.get((before, place))
        offsets.append(None if start is None or step is None else start + step)
    return offsets


@dataclass(frozen=True)
class _Peer:
    """Where a host listens, and the token that proves that a caller belongs to the job."""

    address: str
    port: int
    token: str

    @contextlib.contextmanager
    def connected(self, place: int, kind: bytes) -> Iterator[socket.socket]:
        with socket.create_connection((self.address, self.port), _SILENCE_SECONDS) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(_HEADER.pack(self.token.encode(), kind, place))
            yield connection


def _ask(place: int, target: int, peer: _Peer) -> Link:
    """Ask the target for the time. The answer with the shortest round trip is the most exact one."""
    answers = []
    try:
        with peer.connected(place, _ASK) as connection:
            for _ in range(_QUESTIONS):
                asked, start = time.time(), time.perf_counter()
                connection.sendall(_ASK)
                (answer,) = _TIME.unpack(_receive(connection, _TIME.size))
                seconds = time.perf_counter() - start
                answers.append((seconds, answer - asked - seconds / 2))
    except OSError as error:
        return Link(place, target, problem=f"{peer.address}:{peer.port}: {error}")
    return Link(place, target, *min(answers))


def _send(place: int, peer: _Peer) -> None:
    """Send data until the other host closes the connection."""
    data = bytes(_CHUNK)
    deadline = time.monotonic() + _SILENCE_SECONDS
    with contextlib.suppress(OSError), peer.connected(place, _SEND) as connection:
        while time.monotonic() < deadline:
            connection.sendall(data)


class _Listener:
    """Answers the other hosts."""

    def __init__(self, server: socket.socket | None) -> None:
        self.port = server.getsockname()[1] if server else 0
        self.token = secrets.token_hex(16)
        self.received: dict[int, float] = {}
        """Place of a host -> bytes per second that it sent here, at best."""

    def serve(self, server: socket.socket) -> None:
        """Answer until the socket is shut down."""
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        answers: dict[bytes, Callable[[socket.socket, int], None]] = {
            _ASK: self._report_time,
            _SEND: self._count,
        }
        with contextlib.suppress(OSError), connection:
            connection.settimeout(_SILENCE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            token, kind, place = _HEADER.unpack(_receive(connection, _HEADER.size))
            if secrets.compare_digest(token, self.token.encode()) and kind in answers:
                answers[kind](connection, place)

    def _report_time(self, connection: socket.socket, _: int) -> None:
        for _ in range(_QUESTIONS):
            _receive(connection, len(_ASK))
            connection.sendall(_TIME.pack(time.time()))

    def _count(self, connection: socket.socket, place: int) -> None:
        buffer = bytearray(_CHUNK)
        connection.recv_into(buffer)
        start = time.perf_counter()
        warm, end = start + _WARM_UP_SECONDS, start + _WARM_UP_SECONDS + _MEASURED_SECONDS
        count, now = 0, start
        with contextlib.suppress(TimeoutError):
            while now < end:
                connection.settimeout(end - now)
                length = connection.recv_into(buffer)
                if not length:
                    break
                now = time.perf_counter()
                count += length if now > warm else 0
        rate = count / max(time.perf_counter() - warm, _MEASURED_SECONDS)
        self.received[place] = max(self.received.get(place, 0.0), rate)


@contextlib.contextmanager
def _listening(place: int | None, address: str) -> Iterator[_Listener]:
    if place is None:
        yield _Listener(None)
        return
    with socket.create_server((address, 0)) as server:
        listener = _Listener(server)
        thread = threading.Thread(target=listener.serve, args=(server,), daemon=True)
        thread.start()
        try:
            yield listener
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def _receive(connection: socket.socket, length: int) -> bytes:
    data = connection.recv(length, socket.MSG_WAITALL)
    if len(data) < length:
        raise ConnectionResetError("the other host closed the connection")
    return data
