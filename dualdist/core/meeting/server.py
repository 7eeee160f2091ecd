"""The server at which the ranks of a job meet before any backend runs: it knows who is missing, and who has ended.

Rank 0 runs it, or the launcher for all its processes. Each rank connects, sends a text, and receives the texts of all
ranks when the last one has arrived. It keeps the connection until its `init()` has ended. The kernel closes the
connection of a process that ends before, and the server reports that rank to all others: torch, Horovod and MPI connect
the ranks in C, where each would wait for a dead rank until a timeout. A stopped rank keeps its connection, so a rank
that waits too long has the server ask all others for a sign of life.

On each new connection, both ends prove that they know the job's secret: HMAC-SHA256 of two random challenges, as in
multiprocessing.connection, but with fixed sizes and without unpickling. Until then, no data is interpreted. The server
is one thread. A silent or slow client does not delay other clients, and its connection is closed after a short time.
The data after the proof is neither encrypted nor signed, because addresses are not secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import json
import os
import resource
import secrets
import selectors
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from ..checks import shown_ranks
from ..process import in_time


def connected(address: str, port: int, seconds: float) -> socket.socket:
    """Return a connection to a host or an abstract address, which has the timeout `seconds`. Raises OSError.

    socket.create_connection imports encodings.idna, which takes several ms of the start of each rank.
    """
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(_socket_for(address))
        connection.settimeout(seconds)
        connection.connect(address if connection.family == socket.AF_UNIX else (address, port))
        stack.pop_all()
    return connection


@contextlib.contextmanager
def reserved_port(*, stays_after_exec: bool = False) -> Iterator[int]:
    """Yield a port of this machine that the kernel gives to nobody else while the block runs.

    A process can still listen on it: both sockets have SO_REUSEADDR, and this one does not listen (socket(7)).
    stays_after_exec: whether a program that replaces this one in its process keeps the port.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.set_inheritable(stays_after_exec)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])


_GREETING = b"dualdist-meeting-1\n"
_LOOP_FILES = 3
"""A selector and a pair of sockets."""
_CHALLENGE = _DIGEST = 32


def reach(endpoints: Sequence[tuple[str, int]], secret: bytes, seconds: float) -> socket.socket:
    """Return a connection to a MeetingServer that knows `secret`, at the first of `endpoints` where one answers.

    All are tried at once: one may lead to another network. Raises OSError without an answer within `seconds`.
    """
    problems = []
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as selector:
        for host, port in endpoints:
            connection = opened.enter_context(_socket_for(host))
            connection.setblocking(False)
            is_unix = connection.family == socket.AF_UNIX
            try:
                code = connection.connect_ex(host if is_unix else (_address(host, seconds), port))
            except socket.gaierror as error:
                problems.append(f"the host {host!r} has no address ({error.strerror})")
                continue
            if code in (0, errno.EINPROGRESS):
                selector.register(connection, selectors.EVENT_WRITE, f"{host}:{port}")
            else:
                problems.append(f"{host}:{port}: {os.strerror(code)}")
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                connection = cast(socket.socket, key.fileobj)
                selector.unregister(connection)
                try:
                    connection.settimeout(seconds)
                    _prove(connection, secret)
                    return connection.dup()
                except OSError as error:
                    problems.append(f"{key.data}: {error}")
        problems += [f"{key.data}: timed out" for key in selector.get_map().values()]
    raise ConnectionError("; ".join(problems) or "its host has no address that others can reach")


def _address(host: str, seconds: float) -> str:
    """Return an address of `host`. Raises gaierror without one within `seconds`."""
    if ":" in host or host.replace(".", "").isdecimal():
        return host
    try:
        # In a thread: name servers that do not answer hold it up for longer.
        return in_time(lambda: socket.gethostbyname(host), seconds)
    except TimeoutError:
        raise socket.gaierror(socket.EAI_AGAIN, "no name server has answered") from None
    except (OSError, UnicodeError) as error:
        raise socket.gaierror(socket.EAI_NONAME, getattr(error, "strerror", str(error))) from None


def _socket_for(host: str) -> socket.socket:
    if host.startswith("\0"):
        return socket.socket(socket.AF_UNIX)
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def own_peer(connection: socket.socket) -> int | None:
    """Return the process ID at the other end of a Unix socket (unix(7)); None if another user's process is there."""
    process, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process if user == os.geteuid() else None


def is_foreign(connection: socket.socket) -> bool:
    """Return whether another user's process is at the other end, as far as the kernel knows: of a Unix socket."""
    return connection.family == socket.AF_UNIX and own_peer(connection) is None


def _prove(connection: socket.socket, secret: bytes) -> None:
    """Prove to the server at the other end, and let it prove, that both know `secret`. Raises OSError."""
    if is_foreign(connection) or _read(connection, len(_GREETING)) != _GREETING:
        raise ConnectionError("another program answers there")
    theirs, mine = _read(connection, _CHALLENGE), secrets.token_bytes(_CHALLENGE)
    connection.sendall(mine + _proof(secret, b"client", theirs, mine))
    if not hmac.compare_digest(_read(connection, _DIGEST), _proof(secret, b"server", theirs, mine)):
        raise ConnectionError("it did not prove that it knows this job's secret")


def _read(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("it did not prove that it knows this job's secret")
        data += part
    return data


def _proof(secret: bytes, role: bytes, server: bytes, client: bytes) -> bytes:
    return hmac.digest(secret, role + server + client, "sha256")


# The messages after the proof. Each is a list in JSON, compressed, after its length.

HELLO = "hello"
"""From a rank, at first: [HELLO, rank, size]."""
TEXT = "text"
"""From a rank: [TEXT, text, seconds, timeout, advice], its part of a gather. seconds: how long it still waits for the
others. timeout, advice: how long it then has waited, and the last sentences of the error if one does not arrive."""
TEXTS = "texts"
"""From the server: [TEXTS, texts of all ranks]."""
FAILED = "failed"
"""From the server: [FAILED, error, is_own]. A rank has waited too long in a gather. It receives the error before the
others, and sends [FAILED] when it has reported it; then all receive it."""
STALLED = "stalled"
"""From a rank that waits too long for others: [STALLED]. The answer is LOST, or [STALLED] if all are alive."""
QUESTION = "question"
"""From the server: [QUESTION], which the rank sends back."""
LOST = "lost"
"""From the server: [LOST, rank], which has ended, is stopped, or whose `init()` has failed."""
STARTED = "started"
"""From a rank whose `init()` has ended: [STARTED]. From rank 0's server: its own `init()` has ended; it closes."""

_LENGTH = struct.Struct("!I")
_LONGEST = 1 << 28
"""Bytes of a message."""


def packed(*message: Any) -> bytes:
    """Return the bytes to send for a message."""
    # Ranks repeat much of each other's texts.
    data = zlib.compress(json.dumps(message).encode(), 1)
    return _LENGTH.pack(len(data)) + data


def take_message(unread: bytearray) -> list[Any] | None:
    """Remove the first message from `unread` and return it; None while it is not complete."""
    end = _LENGTH.size + (_LENGTH.unpack_from(unread)[0] if len(unread) >= _LENGTH.size else 0)
    if len(unread) < end:
        return None
    message = _unpacked(bytes(unread[_LENGTH.size : end]))
    del unread[:end]
    return message


def _unpacked(data: bytes) -> list[Any]:
    return list(json.loads(zlib.decompress(data)))


_PROOF_SECONDS = 10.0
"""How long a client may take for its proof and its first message."""
_SIGN_SECONDS = 1.0
"""How long a rank may take for a sign of life."""
_TOGETHER_SECONDS = 0.5
"""Ranks that give up within this time of each other count as giving up together."""
_FAREWELL_SECONDS = 3.0
"""How long a server that closes waits until its last messages are sent."""
_SHORTAGE_SECONDS = 1.0
"""How long to accept no connections when too many files are open."""
SPARE_FILES = 256
"""For what this process opens besides the connections to other ranks: for agreements, data files and the like."""
_BACKLOG = 4096


class MeetingServer(contextlib.AbstractContextManager["MeetingServer"]):
    """Serves meetings of `size` ranks, one after the other, until it is closed. A context manager.

    hosts: the addresses to listen on, "" for all; or an abstract Unix address, "\\0..." (unix(7)), for processes of
    this user. port: the same on all addresses, 0 for a free one. Raises OSError if they are not free.
    """

    def __init__(self, size: int, hosts: Iterable[str], secret: bytes, port: int = 0) -> None:
        self._size = size
        self._secret = secret
        self._attendance = _Attendance(size)
        """The meeting of the ranks that connect now."""
        self._writers: set[asyncio.StreamWriter] = set()
        """All connections."""
        self._tasks: set[asyncio.Task[None]] = set()
        """What serves them: asyncio keeps no references to tasks."""
        self._farewell = b""
        raise_file_limit(size)
        with contextlib.ExitStack() as undo:
            # A port that is free on one address may be taken on another.
            with contextlib.nullcontext(port) if port else reserved_port() as self.port:
                self._listeners = [undo.enter_context(listener_at(host, self.port)) for host in hosts]
            # The event loop needs so many files, and would fail in its thread.
            with contextlib.ExitStack() as spare:
                for _ in range(_LOOP_FILES):
                    spare.enter_context(socket.socket())
            undo.pop_all()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._work, name="dualdist-meeting", daemon=True)
        self._thread.start()
        self._up.wait()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *farewell: Any) -> None:
        """Send the message `farewell` to all ranks, if given, and stop serving. Safe to call twice."""
        loop, self._loop = self._loop, None
        if loop is not None:
            self._farewell = packed(*farewell) if farewell else b""
            loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _work(self) -> None:
        try:
            asyncio.run(self._run())
        finally:
            # Wake the constructor, even if the server could not start.
            self._up.set()

    async def _run(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        for listener in self._listeners:
            listener.setblocking(False)
            loop.add_reader(listener, self._accept, loop, listener)
        self._up.set()
        await self._stop.wait()
        for listener in self._listeners:
            loop.remove_reader(listener)
            listener.close()
        await asyncio.sleep(0)  # so that the tasks of new connections begin: else they would not close them
        writers, self._writers = self._writers, set()
        for writer in writers:
            writer.write(self._farewell)
            writer.close()
        # Exceptions are results: the other end may be gone.
        sent = asyncio.gather(*[writer.wait_closed() for writer in writers], return_exceptions=True)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(sent, _FAREWELL_SECONDS)

    def _accept(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        # Not asyncio.Server: in Python 3.11, it never closes a connection that arrives while it closes.
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # too many files are open
            loop.remove_reader(listener)
            loop.call_later(_SHORTAGE_SECONDS, loop.add_reader, listener, self._accept, loop, listener)
            return
        task = loop.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        """Serve one connection. Any error closes it, without an answer."""
        connection.setblocking(False)
        with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError, ValueError, zlib.error):
            if is_foreign(connection):
                connection.close()
                return
            reader, writer = await asyncio.open_connection(sock=connection)
            self._writers.add(writer)
            try:
                rank, size = await asyncio.wait_for(self._greet(reader, writer), _PROOF_SECONDS)
                if self._attendance.is_closed:
                    self._attendance = _Attendance(self._size)
                attendance = self._attendance
                # A rank that is here already begins its next start before the others, or there are two of this rank.
                if size == self._size and rank not in attendance.writers:
                    await self._attend(attendance, rank, reader, writer)
            finally:
                self._writers.discard(writer)
                writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, int]:
        """Exchange proofs, and return the rank at the other end and its size of the world."""
        mine = secrets.token_bytes(_CHALLENGE)
        writer.write(_GREETING + mine)
        theirs = await reader.readexactly(_CHALLENGE)
        proof = await reader.readexactly(_DIGEST)
        if not hmac.compare_digest(proof, _proof(self._secret, b"client", mine, theirs)):
            raise ValueError
        writer.write(_proof(self._secret, b"server", mine, theirs))
        _, rank, size = await _receive(reader)
        return int(rank), int(size)

    async def _attend(
        self, attendance: _Attendance, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        attendance.writers[rank] = writer
        try:
            while True:
                attendance.handle(rank, *await _receive(reader))
        finally:
            if writer in self._writers:  # else this server leaves first
                attendance.leave(rank)


class _Attendance:
    """Which ranks attend one meeting: their connections, and the gather in progress."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.writers: dict[int, asyncio.StreamWriter] = {}
        """The connection of each rank that has arrived, until it has started or ended."""
        self.is_closed = False
        """Whether it takes no more ranks: all have arrived, or those that have arrived give up."""
        self._has_begun = False
        """Whether all ranks have arrived."""
        self._texts: dict[int, str] = {}
        self._waits: dict[int, tuple[float, float, str]] = {}
        """When each of these ranks gives up, after how many seconds, and its advice."""
        self._gathers = 0
        """How many gathers have ended."""
        self._error = ""
        self._unanswered: set[int] = set()
        """The ranks that have not answered the question yet."""
        self._askers: set[int] = set()
        """The ranks that wait until all others have answered."""

    def handle(self, rank: int, kind: str, *content: Any) -> None:
        """Handle a message of `rank`."""
        if kind == TEXT:
            self._gather(rank, *content)
        elif kind == FAILED:
            self._send_to(self.writers, FAILED, self._error, False)
        elif kind == STALLED:
            if not self._askers:
                self._unanswered = self.writers.keys() - {rank}
                self._send_to(self._unanswered, QUESTION)
                asyncio.get_running_loop().call_later(_SIGN_SECONDS, self._judge)
            self._askers.add(rank)
        elif kind == QUESTION:
            self._unanswered.discard(rank)
        elif kind == STARTED:
            del self.writers[rank]

    def leave(self, rank: int) -> None:
        """Report to the others that `rank` has closed its connection, unless it has started."""
        if self.writers.pop(rank, None) is None:
            return
        if self._has_begun:
            self._send_to(self.writers, LOST, rank)
        elif self._error:
            self._send_to(self.writers, FAILED, self._error, False)
        self._texts.pop(rank, None)

    def _gather(self, rank: int, text: str, seconds: float, timeout: float, advice: str) -> None:
        self._texts[rank] = text
        if len(self._texts) < self._size:
            loop = asyncio.get_running_loop()
            self._waits[rank] = loop.time() + seconds, timeout, advice
            loop.call_later(seconds, self._give_up, self._gathers, rank)
            return
        self._has_begun = self.is_closed = True
        texts, self._texts = self._texts, {}
        self._gathers += 1
        self._send_to(self.writers, TEXTS, [texts[rank] for rank in range(self._size)])

    def _give_up(self, gather: int, rank: int) -> None:
        if gather == self._gathers and rank in self._texts and not self._error:
            self.is_closed = True
            missing = [other for other in range(self._size) if other not in self._texts]
            # Ranks that began together give up together. The lowest one reports, so rank 0 if it is among them.
            soon = asyncio.get_running_loop().time() + _TOGETHER_SECONDS
            reporter = min(other for other in self._texts if self._waits[other][0] <= soon)
            self._error = not_arrived(reporter, missing, *self._waits[reporter][1:])
            self._send_to([reporter], FAILED, self._error, True)

    def _judge(self) -> None:
        askers, self._askers = self._askers, set()
        silent = self._unanswered & self.writers.keys()
        if silent:
            self._send_to(self.writers.keys() - {min(silent)}, LOST, min(silent))
        else:
            self._send_to(askers & self.writers.keys(), STALLED)

    def _send_to(self, ranks: Iterable[int], *message: Any) -> None:
        data = packed(*message)
        for rank in ranks:
            self.writers[rank].write(data)


def not_arrived(rank: int, ranks: Sequence[int], seconds: float, advice: str) -> str:
    """Return the text of the error of `rank`, which has waited so many seconds for `ranks`."""
    return f"Rank {rank} waited {seconds:.0f} s for {shown_ranks(ranks)}, which did not arrive. {advice}"


async def _receive(reader: asyncio.StreamReader) -> list[Any]:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > _LONGEST:
        raise ValueError
    return _unpacked(await reader.readexactly(length))


def raise_file_limit(more: int) -> tuple[int, int]:
    """Raise this process's limit of open files, as far as possible, if it needs `more` besides those that are open.

    Returns the number that it needs, with `SPARE_FILES`, and the number that it may have.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/dev/fd")) + more + SPARE_FILES
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return needed, needed
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return needed, allowed


def listener_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address, "" for all, or at an abstract one. Raises OSError if it is taken."""
    if host.startswith("\0"):
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(host)
            listener.listen(_BACKLOG)
            undo.pop_all()
        return listener
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server((host, port), backlog=_BACKLOG)
