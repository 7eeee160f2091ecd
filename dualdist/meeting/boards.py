"""Where the ranks find the server of their meeting: what each kind of launcher contributes.

Under most launchers, rank 0 starts the server, and publishes its address where the launcher lets all ranks look: a file
when they share a host, horovodrun's HTTP server, a message of MPI (mpi.py), or a store (backends/store.py). An earlier
start that failed may have left its address there. Nobody answers at it, or a program that does not know the secret, and
the rank looks again. Elsewhere the address is known before: the launcher itself runs the server, or it has given all
ranks an address of rank 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from ..errors import ConfigurationError
from ..launch.environment import RENDEZVOUS, secret_in
from ..types import Launch
from .addresses import INTERFACE, LOOPBACK, candidates, own_node
from .launcher_process import job_digest
from .server import MeetingServer

ADVICE = (
    "Look at its output; every process must call dualdist.init(), with a rank of its own. "
    "Set DUALDIST_START_TIMEOUT_SECONDS to wait longer."
)


class Place(NamedTuple):
    """Where a server listens, or several places where it may listen."""

    hosts: Sequence[str]
    ports: Sequence[int]
    secret: bytes


class Board(ABC):
    """Where the ranks find the server."""

    advice = ADVICE
    """The last sentences of an error about missing ranks."""
    where: str
    """Where that is, and what to do if no server is there: for errors."""
    fix: str
    is_launchers = False
    """Whether the launcher runs the server, from before the ranks start until the last one has ended."""

    @abstractmethod
    def serve(self, size: int) -> MeetingServer | None:
        """On rank 0, start the server for `size` ranks, and publish where it is. None if the launcher runs it."""

    @abstractmethod
    def find(self, seconds: float) -> Place | None:
        """Return where the server is; None if that is not known yet. May wait until it is, for so many seconds."""

    def clear(self) -> None:  # noqa: B027 - most publish nothing
        """On rank 0, when all ranks have arrived or it gives up, remove what it has published."""


class Published(Board):
    """Rank 0 publishes the address of its server."""

    where = "the address that rank 0 has published"
    fix = (
        f"Look at rank 0's output, set {INTERFACE} to the network interface that connects the hosts, or open the "
        "firewall between them."
    )

    def __init__(self, launch: Launch, env: Mapping[str, str]) -> None:
        self._env = env
        self._is_one_host = launch.size in (1, launch.local_size)
        self._own: Place | None = None
        """On rank 0, where its server is."""

    @abstractmethod
    def write(self, text: str) -> None:
        """Publish `text`, in place of any other."""

    @abstractmethod
    def read(self, seconds: float) -> str | None:
        """Return the text that is published. Without one, return None. May wait for it so many seconds."""

    def serve(self, size: int) -> MeetingServer:
        hosts = [] if self._is_one_host else self._candidates()
        secret = secrets.token_bytes(32)
        server = MeetingServer(size, [LOOPBACK, *hosts], secret)
        self._own = Place([LOOPBACK], [server.port], secret)
        try:
            self.write(json.dumps([own_node(), hosts, server.port, secret.hex()]))
        except BaseException:
            server.close()
            raise
        return server

    def _candidates(self) -> list[str]:
        try:
            return candidates(self._env)
        except ConfigurationError:  # all ranks learn of it when they have met: see find_addresses
            return candidates({})

    def find(self, seconds: float) -> Place | None:
        if self._own is not None:
            return self._own
        text = self.read(seconds)
        if not text:
            return None
        node, hosts, port, secret = json.loads(text)
        return Place([LOOPBACK] if node == own_node() else hosts, [port], bytes.fromhex(secret))


def rising(first: float, longest: float) -> Iterator[float]:
    """Yield pauses between polls: each is twice as long as the one before, up to the longest."""
    while True:
        yield first
        first = min(2 * first, longest)


class FileBoard(Published):
    """A file that belongs to this user and has one line."""

    def __init__(self, launch: Launch, env: Mapping[str, str], path: Path) -> None:
        super().__init__(launch, env)
        self._path = path

    def write(self, text: str) -> None:
        with open(self._descriptor(os.O_WRONLY | os.O_TRUNC), "w") as file:
            file.write(f"{text}\n")

    def read(self, seconds: float) -> str | None:
        with open(self._descriptor(os.O_RDONLY)) as file:
            text = file.read()
        return text if text.endswith("\n") else None

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)

    def _descriptor(self, mode: int) -> int:
        # On NFS, only opening it with O_CREAT shows at once whether another host has made it.
        descriptor = os.open(self._path, mode | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if os.fstat(descriptor).st_uid != os.getuid():
            os.close(descriptor)
            raise ConfigurationError(
                f"{self._path} must be a file of this user, but is not. Remove it, or choose another folder (TMPDIR)."
            )
        return descriptor


class HttpBoard(Published):
    """horovodrun's server (horovod/runner/http/http_server.py)."""

    def __init__(self, launch: Launch, env: Mapping[str, str], address: str) -> None:
        super().__init__(launch, env)
        self._url = f"http://{address}/dualdist/rank0"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def write(self, text: str) -> None:
        request = urllib.request.Request(self._url, text.encode(), method="PUT")
        self._opener.open(request, timeout=_HTTP_SECONDS).close()

    def read(self, seconds: float) -> str | None:
        try:
            with self._opener.open(self._url, timeout=_HTTP_SECONDS) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            if error.code == 404:  # not set yet
                return None
            raise

    def clear(self) -> None:
        self.write("")


_HTTP_SECONDS = 60.0


class Known(Board):
    """The address is known before: `place`, of which rank 0 takes the first port that is free."""

    def __init__(self, place: Place, where: str, fix: str, listens_on: Sequence[str] = ("",)) -> None:
        """listens_on: the addresses on which rank 0 listens."""
        self._place, self.where, self.fix, self._listens_on = place, where, fix, listens_on

    def serve(self, size: int) -> MeetingServer | None:
        for port in self._place.ports:
            with contextlib.suppress(OSError):
                return MeetingServer(size, self._listens_on, self._place.secret, port)
        raise ConfigurationError(
            f"One of the ports {', '.join(map(str, self._place.ports))} must be free for rank 0, but none is. "
            "Set MASTER_ADDR and MASTER_PORT to a free one for every process."
        )

    def find(self, seconds: float) -> Place:
        return self._place


class LaunchersBoard(Known):
    """The server of `dualdist run` and `spawn`."""

    is_launchers = True

    def __init__(self, env: Mapping[str, str]) -> None:
        address = env[RENDEZVOUS]
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ConfigurationError(
                f"`{RENDEZVOUS}` must be 'host:port', but is {address!r} instead. The launcher sets it; look at what "
                "overwrites it."
            )
        super().__init__(
            Place([host], [int(port)], secret_in(env)),
            f"{RENDEZVOUS}={address}",
            "Check that the launcher still runs, and that no firewall is between the hosts.",
        )

    def serve(self, size: int) -> None:
        return None


def given_board(launch: Launch, env: Mapping[str, str]) -> Board:
    """Return the address of an `init_method`: file:///path, tcp://host:port, or env:// with MASTER_ADDR and _PORT."""
    method = str(launch.init_method)
    url = urlsplit(method)
    if url.scheme == "file":
        return FileBoard(launch, env, Path(url.path))
    try:
        host, port = url.hostname or env["MASTER_ADDR"], url.port or int(env["MASTER_PORT"])
    except (KeyError, ValueError):
        raise ConfigurationError(
            "`init_method` must be 'tcp://host:port', or 'env://' with MASTER_ADDR and MASTER_PORT, but is "
            f"{method!r} instead. Give the address of rank 0, and a free port."
        ) from None
    fix = "Check the address, and that rank 0 was started."
    return Known(Place([host], [port], b""), f"`init_method`={method!r}", fix)


def one_host_board(launch: Launch, env: Mapping[str, str]) -> Board:
    """Return a file of this host whose name is the same for all processes of this job, and different for other jobs."""
    name = f"dualdist-{os.getuid()}-{job_digest(launch, env)}"
    return FileBoard(launch, env, Path(tempfile.gettempdir()) / name)
