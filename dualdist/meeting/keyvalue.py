"""A small key-value server, through which the processes of a job meet before any backend runs, and its client.

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
import logging
import math
import secrets
import socket
import struct
import threading
import time
from typing import Any

from ..errors import ConfigurationError

logger = logging.getLogger("dualdist")

LONGEST_KEY, LONGEST_VALUE = 1024, 1 << 20
"""Bytes."""
_GREETING = b"dualdist-kv-1\n"
_CHALLENGE = _DIGEST = 32
_SET, _GET = b"S", b"G"
_REQUEST = struct.Struct("!cHId")
"""(operation, length of the key, length of the value, seconds to wait)"""
_ANSWER = struct.Struct("!cI")
_FOUND, _ABSENT = b"+", b"-"
_TIMEOUT_SECONDS = 10.0
"""How long the other end may take for its proof, or to complete a request or an answer."""
_LONGEST_WAIT = 86400.0
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of accept(2) after which asyncio tries again every second (asyncio/selector_events.py:_accept_connection)."""


def _proof(secret: bytes, role: bytes, server: bytes, client: bytes) -> bytes:
    return hmac.digest(secret, role + server + client, "sha256")


class KeyValueServer:
    """Serves set and get to clients that know `secret`, until it is closed. A context manager.

    hosts: the addresses to listen on. port: the same on all addresses, 0 for a free one. timeout: seconds in which
    a client must give its proof, or complete a request that it began. Raises OSError when the port is not free.
    """

    def __init__(self, *hosts: str, secret: bytes, port: int = 0, timeout: float = _TIMEOUT_SECONDS) -> None:
        self._secret = secret
        self._timeout = timeout
        self._values: dict[bytes, bytes] = {}
        self._set = asyncio.Condition()
        self._shortage_reported = False
        self._listeners: list[socket.socket] = []
        self.host, self.port = hosts[0], port
        try:
            for host in hosts:
                self._listeners.append(socket.create_server((host, self.port), backlog=1024))
                self.port = int(self._listeners[0].getsockname()[1])
        except OSError:
            for listener in self._listeners:
                listener.close()
            raise
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._work, name="dualdist-key-value", daemon=True)
        self._thread.start()
        self._up.wait()

    def __enter__(self) -> KeyValueServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving and end every connection."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._loop = None
            self._thread.join()

    def _work(self) -> None:
        try:
            asyncio.run(self._run())
        finally:
            # Wake the constructor, even if the server could not start.
            self._up.set()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._report)
        servers = [await asyncio.start_server(self._serve, sock=listener) for listener in self._listeners]
        self._up.set()
        await self._stop.wait()
        for server in servers:
            # asyncio.run ends the connections.
            server.close()

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report once, in one line, that no connection can be accepted. asyncio would log a traceback for each one."""
        if self._stop.is_set():  # asyncio tries again even if it has closed the socket meanwhile
            return
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _SHORTAGES:
            loop.default_exception_handler(context)
        elif not self._shortage_reported:
            self._shortage_reported = True
            logger.warning(
                "The key-value server at %s:%d cannot accept connections: %s. It tries again every second. If this "
                "lasts, raise the limit of open files (ulimit -n), or find out which program connects to this port.",
                self.host,
                self.port,
                error.strerror,
            )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection. Any error closes it, without an answer."""
        with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError, ValueError, asyncio.CancelledError):
            await asyncio.wait_for(self._prove(reader, writer), self._timeout)
            while True:
                # A connection may be idle between requests.
                first = await reader.readexactly(1)
                await self._answer(first, reader, writer)
        writer.transport.abort()

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = secrets.token_bytes(_CHALLENGE)
        writer.write(_GREETING + mine)
        theirs = await reader.readexactly(_CHALLENGE)
        proof = await reader.readexactly(_DIGEST)
        if not hmac.compare_digest(proof, _proof(self._secret, b"client", mine, theirs)):
            raise ValueError
        writer.write(_proof(self._secret, b"server", mine, theirs))
        await writer.drain()

    async def _answer(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rest = await asyncio.wait_for(reader.readexactly(_REQUEST.size - 1), self._timeout)
        operation, key_length, value_length, seconds = _REQUEST.unpack(first + rest)
        if key_length > LONGEST_KEY or value_length > LONGEST_VALUE or operation not in (_SET, _GET):
            raise ValueError
        body = await asyncio.wait_for(reader.readexactly(key_length + value_length), self._timeout)
        key, value = body[:key_length], body[key_length:]
        if operation == _SET:
            async with self._set:
                self._values[key] = value
                if not value:
                    del self._values[key]
                self._set.notify_all()
            found: bytes | None = b""
        else:
            found = await self._get(key, seconds)
        status = _ABSENT if found is None else _FOUND
        writer.write(_ANSWER.pack(status, len(found or b"")) + (found or b""))
        await asyncio.wait_for(writer.drain(), self._timeout)

    async def _get(self, key: bytes, seconds: float) -> bytes | None:
        async def appear() -> bytes:
            async with self._set:
                await self._set.wait_for(lambda: key in self._values)
                return self._values[key]

        # wait_for with 0 seconds would not find it.
        if key in self._values:
            return self._values[key]
        with contextlib.suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(appear(), seconds)
        return None


class KeyValueClient:
    """A client of a KeyValueServer, for one thread. A context manager."""

    def __init__(self, host: str, port: int, secret: bytes, *, timeout: float = _TIMEOUT_SECONDS) -> None:
        """Connect within `timeout` seconds.

        Raises ConfigurationError when no server answers there, or when the server has another secret.
        """
        self._where = f"{host}:{port}"
        deadline = time.monotonic() + timeout
        try:
            self._socket = socket.create_connection((host, port), timeout)
        except OSError as error:
            raise ConfigurationError(
                f"The job's key-value server must answer at {self._where}, but does not: {error}. "
                "Check that the launcher still runs, and that no firewall is between the hosts."
            ) from error
        try:
            self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            self._prove(secret)
        except (OSError, EOFError) as error:
            self._socket.close()
            raise ConfigurationError(
                f"The key-value server at {self._where} must know this job's secret, but did not prove it"
                f"{f' ({error})' if str(error) else ''}. Another program answers there, or DUALDIST_SECRET is wrong."
            ) from error

    def __enter__(self) -> KeyValueClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def set(self, key: str, value: bytes) -> None:
        """Set `key`, or remove it when `value` is empty.

        Raises ValueError when either is too long, OSError when the connection fails.
        """
        self._ask(_SET, key, value, 0.0, _TIMEOUT_SECONDS)

    def get(self, key: str, timeout: float) -> bytes:
        """Return the value of `key`. Waits until it is set, `timeout` seconds at most.

        Raises TimeoutError after that, OSError when the connection fails.
        """
        if math.isnan(timeout):
            raise ValueError("`timeout` must be a number of seconds, but is NaN instead.")
        seconds = min(max(timeout, 0.0), _LONGEST_WAIT)
        found = self._ask(_GET, key, b"", seconds, seconds + _TIMEOUT_SECONDS)
        if found is None:
            raise TimeoutError(f"{key!r} was not set at {self._where} within {timeout:g} s.")
        return found

    def _ask(self, operation: bytes, key: str, value: bytes, seconds: float, timeout: float) -> bytes | None:
        name = key.encode()
        if len(name) > LONGEST_KEY or len(value) > LONGEST_VALUE:
            raise ValueError(
                f"A key must have at most {LONGEST_KEY} bytes and a value {LONGEST_VALUE}, "
                f"but they have {len(name)} and {len(value)} instead."
            )
        self._socket.settimeout(timeout)
        self._socket.sendall(_REQUEST.pack(operation, len(name), len(value), seconds) + name + value)
        status, length = _ANSWER.unpack(self._read(_ANSWER.size))
        found = self._read(length)
        return found if status == _FOUND else None

    def _prove(self, secret: bytes) -> None:
        greeting = self._read(len(_GREETING) + _CHALLENGE)
        if not greeting.startswith(_GREETING):
            raise ConnectionError("it uses another protocol")
        theirs, mine = greeting[len(_GREETING) :], secrets.token_bytes(_CHALLENGE)
        self._socket.sendall(mine + _proof(secret, b"client", theirs, mine))
        if not hmac.compare_digest(self._read(_DIGEST), _proof(secret, b"server", theirs, mine)):
            raise ConnectionError("its proof is wrong")

    def _read(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            part = self._socket.recv(min(length - len(parts), 1 << 16))
            if not part:
                raise ConnectionError("it closed the connection")
            parts += part
        return bytes(parts)
