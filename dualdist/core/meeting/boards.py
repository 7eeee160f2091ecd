"""Where the ranks find the server of their meeting: what each kind of launcher contributes.

Under most launchers, rank 0 starts the server, and publishes its address where the launcher lets all ranks look:
horovodrun's HTTP server (horovod/http_store.py), a message of MPI (mpi/meeting.py), or a store
(core/backends/store.py). An earlier start may have left its address there: nobody answers who knows the secret, and the
rank looks again. Elsewhere the address is known before: the ranks share a host, the launcher itself runs the server, or
it has given all ranks an address of rank 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from ...errors import ConfigurationError
from ..extensions import extension, needed
from ..launch import is_one_host
from ..types import Launch
from .addresses import INTERFACE, LOOPBACK, candidates, own_node
from .server import MeetingServer

ADVICE = (
    "Look at its output; every process must join, with a rank of its own. "
    "Set DUALDIST_START_TIMEOUT_SECONDS to wait longer."
)


class ServerAddress(NamedTuple):
    """Where a server listens, or several places where it may listen."""

    hosts: Sequence[str]
    ports: Sequence[int]
    secret: bytes


class Board(ABC):
    """Where the ranks find the server."""

    advice = ADVICE
    """The last sentences of an error about missing ranks."""
    where: str
    """The place of the server, as errors name it."""
    fix: str
    """What to do if no server is there, as errors say it."""
    is_launchers = False
    """Whether the launcher runs the server, from before the ranks start until the last one has ended."""

    @abstractmethod
    def serve(self, size: int) -> MeetingServer | None:
        """On rank 0, start the server for `size` ranks, and publish where it is. None if the launcher runs it."""

    @abstractmethod
    def find(self, seconds: float) -> ServerAddress | None:
        """Return where the server is; None if that is not known yet. May wait until it is, for so many seconds."""

    def clear(self) -> None:  # noqa: B027 - most publish nothing
        """On rank 0, when all ranks have arrived or it gives up, remove what it has published."""


class PublishedBoard(Board):
    """Rank 0 publishes the address of its server."""

    where = "the address that rank 0 has published"
    fix = (
        f"Look at rank 0's output, set {INTERFACE} to the network interface that connects the hosts, or open the "
        "firewall between them."
    )

    def __init__(self, launch: Launch, env: Mapping[str, str]) -> None:
        self._env = env
        self._is_one_host = is_one_host(launch)
        self._own: ServerAddress | None = None
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
        self._own = ServerAddress([LOOPBACK], [server.port], secret)
        try:
            place = [own_node(), hosts, server.port, secret.hex()]
            self.write(json.dumps(place, separators=(",", ":")))  # PMI-1 allows no blanks
        except BaseException:
            server.close()
            raise
        return server

    def _candidates(self) -> list[str]:
        try:
            return candidates(self._env)
        except ConfigurationError:  # all ranks learn of it when they have met: see find_addresses
            return candidates({})

    def find(self, seconds: float) -> ServerAddress | None:
        if self._own is not None:
            return self._own
        text = self.read(seconds)
        if not text:
            return None
        node, hosts, port, secret = json.loads(text)
        return ServerAddress([LOOPBACK] if node == own_node() else hosts, [port], bytes.fromhex(secret))


def rising(first: float, longest: float) -> Iterator[float]:
    """Yield pauses between polls: each is twice as long as the one before, up to the longest."""
    while True:
        yield first
        first = min(2 * first, longest)


class KnownBoard(Board):
    """The address is known before: `place`, of which rank 0 takes the first port that is free."""

    def __init__(self, place: ServerAddress, where: str, fix: str, listens_on: Sequence[str] = ("",)) -> None:
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

    def find(self, seconds: float) -> ServerAddress:
        return self._place


def given_board(launch: Launch, env: Mapping[str, str]) -> Board:
    """Return the board of an `init_method`: file:///path, tcp://host:port, or env:// with MASTER_ADDR and _PORT."""
    method = str(launch.init_method)
    url = urlsplit(method)
    if url.scheme == "file":
        return cast(Board, needed("file_board")(launch, env, Path(url.path)))
    try:
        host, port = url.hostname or env["MASTER_ADDR"], url.port or int(env["MASTER_PORT"])
    except (KeyError, ValueError):
        raise ConfigurationError(
            "`init_method` must be 'tcp://host:port', or 'env://' with MASTER_ADDR and MASTER_PORT, but is "
            f"{method!r} instead. Give the address of rank 0 and a free port, or leave init_method out: launchers that "
            "set no address need none."
        ) from None
    fix = "Check the address, and that rank 0 was started."
    return KnownBoard(ServerAddress([host], [port], b""), f"`init_method`={method!r}", fix)


# The process that started this one identifies the job.


class LauncherProcess(NamedTuple):
    """Process ID and start time (clock ticks since boot), because process IDs are reused."""

    pid: int
    start_time: int

    def is_alive(self) -> bool:
        """Return whether the process still runs."""
        with contextlib.suppress(OSError):
            return _start_time(self.pid) == self.start_time
        return False


def find_launcher_process(variable: str) -> LauncherProcess:
    """Return the process that set `variable` for this one: the nearest ancestor that does not have it itself.

    A shell between the two has inherited the variable, so it is not the launcher.
    """
    prefix, pid = f"{variable}=".encode(), os.getppid()
    while True:
        # The environment of another user's process, such as Slurm's, cannot be read.
        with contextlib.suppress(OSError):
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if any(entry.startswith(prefix) for entry in entries):
                pid = int(process_status(pid)[1])
                continue
        return LauncherProcess(pid, _start_time(pid))


def _start_time(pid: int) -> int:
    return int(process_status(pid)[19])


def process_status(pid: int) -> list[str]:
    """Return the fields of proc(5)'s stat after the command's name: state, parent, ..., the 20th is the start time."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


# The board of a launcher.


def find_board(launch: Launch, env: Mapping[str, str], *, may_start_mpi: bool = True) -> Board | None:
    """Return where the ranks of `launch` find the server of their meeting, None if there is no such place.

    Not for ranks that share a store of torch already, such as torchrun's: see core/backends/store.py.
    """
    source = launch.sources.get("rank")
    is_alone = launch.size == 1 and launch.init_method == "env://" and not env.get("MASTER_ADDR")
    if launch.init_method is not None and not is_alone:
        return given_board(launch, env)
    if source == "DUALDIST_RANK" and env.get("DUALDIST_RENDEZVOUS"):
        return cast(Board, needed("launchers_board")(env))
    horovods = source == "HOROVOD_RANK" and env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if horovods and (store := extension("horovods_store")) is not None:
        address = f"{horovods}:{env['HOROVOD_GLOO_RENDEZVOUS_PORT']}"
        return cast(Board, store.HttpBoard(launch, env, address))
    if launch.starts_mpi and (mpi := extension("mpi")) is not None:
        # MPI takes long to start, and can start once only.
        wants_mpi = mpi.has_started() or (may_start_mpi and not is_one_host(launch))
        if wants_mpi and mpi.world_size() == launch.size:
            return cast(Board, mpi.MpiBoard(launch, env))
    if is_one_host(launch) and (host := extension("host_board")) is not None:
        return cast(Board, host.host_board(launch, env))
    slurm_board = extension("slurm_board")
    return None if slurm_board is None else cast("Board | None", slurm_board(launch.rank, env))


def no_board(launch: Launch, otherwise: str) -> ConfigurationError:
    """Return the error of ranks that have no board. otherwise: what else to do than to give an address."""
    return ConfigurationError(
        f"World size is {launch.describe('size')}, but no address of rank 0 is known, and nothing shows that all "
        f"processes are on one node. Set MASTER_ADDR and MASTER_PORT for every process, or {otherwise}."
    )
