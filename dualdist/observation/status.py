"""Questions between ranks that are answered at any time, such as what a rank is doing.

Every rank answers from a thread that does nothing else, so it does while its other threads wait. A process that has
ended refuses the connection; one that is stopped, or behind a cut link, does not answer. The store cannot be used for
this: nobody can read it while the rank that serves it is stopped. The same thread reads what wakes it on SIGUSR2.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..core.meeting import process_status
from ..core.meeting.links import own_node

_PF_EXITING = 0x4
"""Of the flags in /proc/PID/stat (include/linux/sched.h): the process closes its files before it is a zombie."""
_PACKAGE = f"{Path(__file__).parents[1]}/"
_TOKEN_BYTES = 16
_LONGEST = 1 << 16
"""Bytes of a question or an answer."""
_MOST_CALLERS = 64
"""How many connections are open at a time; for the next one, the oldest is closed."""
_SHORTAGE_SECONDS = 0.1
"""How long the server waits when it cannot accept a connection, for example because too many files are open."""


class Contact(NamedTuple):
    """Where a rank answers questions."""

    host: str
    port: int
    token: str
    """In hexadecimal digits. The server answers only questions that begin with it."""
    place: str = ""
    process: int = 0
    start: int = 0
    """The process, and what identifies it on its host: where its ID is valid, and its start time."""

    def state(self, own: Contact) -> str:
        """Return what /proc says of the process that does not answer; "" if it is on another host than `own`."""
        if not self.place or self.place != own.place:
            return ""
        status = ["X"]
        with contextlib.suppress(OSError):
            status = process_status(self.process)
        if status[0] in "XZ" or int(status[6]) & _PF_EXITING or int(status[19]) != self.start:
            return "its process has ended"
        if status[0] in "Tt":
            return "it is stopped"
        return "it runs: it is about to end, a thread keeps Python's global lock, or it is slow"


def call_of_torch(stack: Iterable[Sequence[Any]]) -> str:
    """Return the function of torch.distributed in which a thread waits; "" if it is in none.

    stack: (file, line, function), the innermost first. Process groups of this package wait in frames of their own. Not
    the checkpoints of torch.distributed, which may write to a disk.
    """
    name, _, function = next((frame for frame in stack if not frame[0].startswith(_PACKAGE)), ("", 0, ""))
    return function if "/torch/distributed/" in name and "/checkpoint/" not in name else ""


class StatusServer:
    """Answers questions, on a free port of `address`.

    answer: takes a question and returns the answer, both as values of JSON. It must return at once.
    """

    def __init__(self, address: str, answer: Callable[[Any], Any]) -> None:
        self._answer = answer
        self._listener = socket.create_server((address, 0), backlog=1024)
        self._listener.setblocking(False)
        port, token = self._listener.getsockname()[1], secrets.token_hex(_TOKEN_BYTES)
        place, start = f"{own_node()} {os.readlink('/proc/self/ns/pid')}", int(process_status(os.getpid())[19])
        self.contact = Contact(address, port, token, place, os.getpid(), start)
        self._callers: dict[int, tuple[socket.socket, bytearray]] = {}
        """The open connections by descriptor, the oldest first, with what each has sent."""
        self._followed: dict[int, Callable[[], None]] = {}
        self._poll = select.epoll()  # which takes descriptors while the thread waits
        self._poll.register(self._listener, select.EPOLLIN)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="dualdist-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering: from now on, connections are refused."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()
        self._poll.close()

    def abandon(self) -> None:
        """In a forked process, close its descriptors. The parent continues to answer."""
        self._listener.close()
        self._poll.close()

    def follow(self, descriptor: int, act: Callable[[], None]) -> None:
        """Call `act`, which must return at once, when `descriptor` is readable. Closing it ends that."""
        self._followed[descriptor] = act
        self._poll.register(descriptor, select.EPOLLIN)

    def _serve(self) -> None:
        while not self._closing:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._callers:
                    self._read(descriptor)
                elif descriptor in self._followed:
                    self._followed[descriptor]()
                elif descriptor == self._listener.fileno():
                    self._accept()
        for descriptor in list(self._callers):
            self._forget(descriptor)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if not self._closing and not isinstance(error, BlockingIOError):
                time.sleep(_SHORTAGE_SECONDS)
            return
        connection.setblocking(False)
        if len(self._callers) == _MOST_CALLERS:
            self._forget(next(iter(self._callers)))
        self._callers[connection.fileno()] = connection, bytearray()
        self._poll.register(connection, select.EPOLLIN)

    def _read(self, descriptor: int) -> None:
        connection, read = self._callers[descriptor]
        part = b""
        with contextlib.suppress(OSError):
            part = connection.recv(_LONGEST)
        read += part
        if part and not read.endswith(b"\n") and len(read) < _LONGEST:
            return
        token, _, question = bytes(read).partition(b" ")
        if hmac.compare_digest(token, self.contact.token.encode()):
            with contextlib.suppress(OSError, ValueError):
                connection.send(json.dumps(self._answer(json.loads(question))).encode() + b"\n")
        self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        self._callers.pop(descriptor)[0].close()


def ask(contact: Contact, question: Any, seconds: float) -> Any:
    """Return the answer to `question`, which must arrive within `seconds`.

    Raises ConnectionError when the process has ended, another OSError, such as TimeoutError, without an answer.
    """
    deadline = time.monotonic() + seconds
    answer = bytearray()
    with socket.create_connection((contact.host, contact.port), seconds) as connection:
        connection.sendall(f"{contact.token} {json.dumps(question)}\n".encode())
        while not answer.endswith(b"\n"):
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
            part = connection.recv(_LONGEST)
            if not part or len(answer) > _LONGEST:
                raise ConnectionError(f"no rank answers at {contact.host}:{contact.port}")
            answer += part
    try:
        return json.loads(answer)
    except ValueError:
        raise ConnectionError(f"another program answers at {contact.host}:{contact.port}") from None
