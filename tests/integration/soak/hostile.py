"""Connections to the ports of a world that do not belong to it."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterable

import psutil

OPEN_MPI_PORTS = range(61000, 61500)
"""Ports that the attack spares: a rank that accepts a connection there waits for ever for its first bytes (Open MPI
4.1.4, mca_btl_tcp_recv_blocking)."""
PAUSE_SECONDS = 0.02
SECONDS = 0.2
OPENINGS = (
    b"",
    b"\0",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PUT /x/y HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
    b"\xff" * 5000,
    b'0123456789abcdef ["position", "set 0", ["barrier", null]]\n',
)


class Attack:
    """Connects to the listening ports of processes until it is closed, and sends what does not belong there."""

    def __init__(self, seed: int) -> None:
        self._numbers = random.Random(seed)
        self._pids: set[int] = set()
        self._stopping = threading.Event()
        self._held: list[socket.socket] = []
        self.count = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, pid: int) -> None:
        """Attack this process, too."""
        self._pids.add(pid)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        for held in self._held:
            held.close()

    def _run(self) -> None:
        while not self._stopping.wait(PAUSE_SECONDS):
            for address in _listening(tuple(self._pids)):
                self._connect(address)

    def _connect(self, address: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):
            connection = socket.create_connection(address, SECONDS)
            self.count += 1
            what = self._numbers.randrange(len(OPENINGS) + 1)
            sent = self._numbers.randbytes(300) if what == len(OPENINGS) else OPENINGS[what]
            connection.sendall(sent)
            if self._numbers.random() < 0.2 and len(self._held) < 50:
                self._held.append(connection)
                return
            if self._numbers.random() < 0.5:
                connection.recv(100)
            connection.close()


def _listening(pids: Iterable[int]) -> list[tuple[str, int]]:
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            for entry in psutil.Process(pid).net_connections("tcp4"):
                if entry.status == psutil.CONN_LISTEN and entry.laddr.port not in OPEN_MPI_PORTS:
                    found.append((entry.laddr.ip, entry.laddr.port))
    return found
