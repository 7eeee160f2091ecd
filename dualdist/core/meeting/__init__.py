"""How the ranks of a job meet before any backend runs, and who is missing. Imports no torch.

A meeting has one server (server.py). Each rank connects to it, and the ranks gather texts through it. While they start,
the server reports a rank that ends to all others. A board is where the ranks find the server: what each kind of
launcher contributes.

Under most launchers, rank 0 starts the server, and publishes its address where the launcher lets all ranks look:
horovodrun's HTTP server (horovod/http_store.py), a message of MPI (mpi/meeting.py), or a store, which needs torch
(core/backends/torch_groups.py). An earlier start may have left its address there: nobody answers who knows the secret,
and the rank looks again. Elsewhere the address is known before: the ranks share a host, the launcher itself runs the
server, or it has given all ranks an address of rank 0. A server in rank 0 closes when the `init()` of rank 0 has ended.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import math
import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

from ...errors import ConfigurationError, HorovodInternalError, StallError
from .. import extension, needed
from ..launch import RENDEZVOUS, is_one_host, secret_in
from ..types import Launch
from .links import INTERFACE, LOOPBACK, candidates, own_node
from .server import (
    FAILED,
    HELLO,
    LOST,
    QUESTION,
    STALLED,
    STARTED,
    TEXT,
    TEXTS,
    MeetingServer,
    not_arrived,
    packed,
    reach,
    take_message,
)

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


class LaunchersBoard(KnownBoard):
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
            ServerAddress([host], [int(port)], secret_in(env)),
            f"{RENDEZVOUS}={address}",
            "Check that the launcher still runs, and that no firewall is between the hosts.",
        )

    def serve(self, size: int) -> None:
        return None


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

    Not for ranks that share a store of torch already, such as torchrun's: see core/backends/torch_groups.py.
    """
    source = launch.sources.get("rank")
    is_alone = launch.size == 1 and launch.init_method == "env://" and not env.get("MASTER_ADDR")
    if launch.init_method is not None and not is_alone:
        return given_board(launch, env)
    if source == "DUALDIST_RANK" and env.get(RENDEZVOUS):
        return LaunchersBoard(env)
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


T = TypeVar("T")

_CONNECT_SECONDS = 5.0
_PAUSE_SECONDS = (0.002, 0.1)
"""The first and the longest pause between two attempts to connect to the server."""
_ANSWER_SECONDS = 3.0
"""How long the server may take to answer, also when it asks all ranks for a sign of life."""
_CHECK_SECONDS = 0.05
"""How often a rank looks for messages of the server while it starts."""
_READ_BYTES = 1 << 16


class Meeting(contextlib.AbstractContextManager["Meeting"]):
    """One meeting, as one of its ranks sees it. A context manager.

    The ranks gather texts. Then they connect their backends, while `wait_for` and `check` notice that one of them ends.
    Each closes the meeting when its `init()` has ended.
    """

    def __init__(
        self, board: Board, rank: int, size: int, timeout: float, on_error: Callable[[str, bool], object] | None = None
    ) -> None:
        """Start the server on rank 0, unless the launcher runs it. Local.

        timeout: seconds to wait for the other ranks in each gather. on_error: called with (text, whether this rank
        reports the error) when ranks do not arrive. The rank that reports the error calls it first, before any rank
        raises. What it prints is printed before the launcher sees that a process has failed, and ends the others.
        """
        self.rank, self.size = rank, size
        self._board, self._timeout, self._on_error = board, timeout, on_error
        self._server = board.serve(size) if rank == 0 else None
        self._socket: socket.socket | None = None
        self._unread = bytearray()
        self._has_begun = False
        """Whether all ranks have arrived."""
        self._lost: int | None = None
        """A rank that has ended before it has started, is stopped, or whose `init()` has failed."""

    def __exit__(self, error: object, *_: object) -> None:
        self.close(started=error is None)

    def gather(self, text: str) -> list[str]:
        """Return every rank's `text`, in rank order. Collective over the job.

        Raises ConfigurationError on all ranks that have arrived, with the names of those that do not within the
        timeout of one of them. Raises HorovodInternalError if a rank ends after all have arrived.
        """
        deadline = time.monotonic() + self._timeout
        pauses = rising(*_PAUSE_SECONDS)
        while True:
            problem = ""
            left = max(0.0, deadline - time.monotonic())
            try:
                if self._socket is not None or self._connect(left):
                    self._send(TEXT, text, left, self._timeout, self._board.advice)
                    return self._gathered(left)
            except OSError as error:
                # An earlier start has left the address there, or the server refuses a second process of this rank.
                problem = str(error)
                self._disconnect()
                if self._has_begun:
                    self._lost = 0
                    self.check()
            if time.monotonic() >= deadline:
                raise ConfigurationError(self._unreachable(problem))
            time.sleep(next(pauses))

    def wait_for(self, step: Future[T], seconds: float | None = None) -> T:
        """Return the result of `step`, in which another thread connects this rank to the others.

        seconds: how long the step may take. None: it has a timeout itself.

        Raises HorovodInternalError if a rank has ended or is stopped, and names it; StallError after `seconds`. The
        thread is abandoned then: it ends at its own timeout.
        """
        deadline = time.monotonic() + (math.inf if seconds is None else seconds)
        while not step.done():
            self.check()
            if time.monotonic() > deadline:
                late = StallError(
                    f"Rank {self.rank} could not connect to the other ranks in {seconds:g} s. Look at their output."
                )
                self.check(late)
                raise late
            concurrent.futures.wait([step], _CHECK_SECONDS)
        cause = step.exception()
        if isinstance(cause, (OSError, RuntimeError)):
            self.check(cause)
        if isinstance(cause, RuntimeError) and not isinstance(cause, HorovodInternalError):
            text = str(cause).partition("\n")[0]
            raise HorovodInternalError(
                f"Rank {self.rank} could not connect to the other ranks: {text}. Look at their output."
            ) from cause
        return step.result()

    def check(self, cause: BaseException | None = None) -> None:
        """Raise HorovodInternalError, because of `cause`, if a rank has ended.

        cause: an error of this rank that may be the consequence of an end. If given, wait for a sign of life of all.
        """
        if cause is not None:
            self._send(STALLED)
        deadline = time.monotonic() + (0 if cause is None else _ANSWER_SECONDS)
        while self._lost is None and self._socket is not None:
            try:
                message = self._receive(max(0.0, deadline - time.monotonic()))
            except OSError:
                message = [LOST, 0]
            if message is None and cause is not None:  # the server does not answer
                message = [LOST, 0]
            if message is None or message[0] == STALLED:
                break
            if message[0] == QUESTION:
                self._send(QUESTION)
            elif message[0] == LOST:
                self._lost = message[1]
            elif message[0] == STARTED:
                self._disconnect()
        if self._lost is not None:
            raise HorovodInternalError(
                f"Rank {self.rank} could not connect to the other ranks: rank {self._lost} has ended, is stopped, or "
                "its start has failed. Look at its output."
            ) from cause

    def close(self, *, started: bool) -> None:
        """Leave the meeting. Safe to call twice. started: whether this rank has started; if not, the others raise."""
        if started:
            self._send(STARTED)
        self._disconnect()
        server, self._server = self._server, None
        if server is not None:
            if not self._has_begun:
                self._board.clear()
            server.close(*([STARTED] if started else [LOST, self.rank]))

    def _connect(self, seconds: float) -> bool:
        """Try once to connect to the server. Return whether its place is known. Raises OSError."""
        place = self._board.find(seconds)
        if place is None:
            return False
        try:
            endpoints = [(host, port) for host in place.hosts for port in place.ports]
            self._socket = reach(endpoints, place.secret, _CONNECT_SECONDS)
        except OSError as error:
            if not self._board.is_launchers:  # else it must be there
                raise
            raise ConfigurationError(self._unreachable(str(error))) from error
        self._send(HELLO, self.rank, self.size)
        return True

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._unread.clear()

    def _gathered(self, seconds: float) -> list[str]:
        """Return the texts of all ranks. Raises OSError when the server is gone."""
        message = self._receive(seconds + _ANSWER_SECONDS)
        if message is None:  # the server is rank 0's, and stopped
            raise ConfigurationError(not_arrived(self.rank, [0], self._timeout, self._board.advice))
        kind, *content = message
        if kind == FAILED:
            error, is_own = content
            if self._on_error is not None:
                self._on_error(error, is_own)
            if is_own:
                self._send(FAILED)
                self._receive(_ANSWER_SECONDS)  # the others have it now
            raise ConfigurationError(error)
        if kind == LOST and self._has_begun:
            self._lost = content[0]
            self.check()
        if kind != TEXTS:
            raise ConnectionError("the server has closed")
        if self._server is not None and not self._has_begun:
            self._board.clear()
        self._has_begun = True
        return list(content[0])

    def _unreachable(self, problem: str) -> str:
        if not problem:
            return not_arrived(self.rank, [0], self._timeout, self._board.advice)
        return (
            f"Rank {self.rank} of {self.size} could not reach the server of the job, which rank 0 or the launcher "
            f"runs, at {self._board.where}: {problem}. {self._board.fix}"
        )

    def _receive(self, seconds: float) -> list[Any] | None:
        """Return the next message of the server, None after `seconds`. Raises OSError when the server has closed."""
        assert self._socket is not None
        deadline = time.monotonic() + seconds
        while (message := take_message(self._unread)) is None:
            self._socket.settimeout(max(1e-6, deadline - time.monotonic()))
            try:
                part = self._socket.recv(_READ_BYTES)
            except TimeoutError:
                return None
            if not part:
                raise ConnectionError("the server has closed the connection")
            self._unread += part
        return message

    def _send(self, *message: Any) -> None:
        # If the connection is lost, reading from it shows so.
        with contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.settimeout(_ANSWER_SECONDS)
                self._socket.sendall(packed(*message))
