"""Notices, while the ranks connect, that one of them has ended or is stopped.

torch and Horovod connect the ranks in C++, where each waits for a dead rank until a timeout. Here each rank keeps a
connection to rank 0 until it has started. One that closes early is a death, and rank 0 reports it to all. After a
timeout, rank 0 asks all ranks, and one that does not answer is stopped.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from ..errors import HorovodInternalError, StallError
from ..meeting import connected

T = TypeVar("T")

_KEY = "start watch"
_HELLO_SECONDS = 1.0
_TOKEN_BYTES, _RANK_BYTES = 16, 4
_SETTLE_SECONDS = 1.0
"""How long to wait for the report of a death when a step has failed, which may be its consequence."""
_STARTED = (1 << 32) - 1
"""Sent in place of a rank: the sender has started, and may close its connection."""
_QUESTION = _STARTED - 1
"""Sent in place of a rank by rank 0. The receiver sends it back."""


class StartWatch:
    """Watches the ranks of one world while they start."""

    def __init__(self, store: dist.Store, rank: int, size: int, address: str, seconds: float) -> None:
        """Connect to rank 0. Collective over the world; all ranks must have arrived. Never raises.

        store: of this start only. address: of this process. seconds: to wait for rank 0's address. A rank that cannot
        connect is not watched.
        """
        self._rank = rank
        self._lost: int | None = None
        self._changed = threading.Event()
        """Set when a rank has ended, or a step."""
        self._absent = set(range(1, size)) if rank == 0 else set[int]()
        """On rank 0: the ranks that have not connected yet."""
        self._answered: set[int] = set()
        """On rank 0: the ranks that have answered the question."""
        self._peers: dict[int, socket.socket] = {}
        """By rank: on rank 0 the others that start, elsewhere rank 0."""
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._listener: socket.socket | None = None
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            if size > 1:
                self._meet(store, address, size, seconds)
        self._thread = threading.Thread(target=self._watch, name="dualdist-start", daemon=True)
        self._thread.start()

    def _meet(self, store: dist.Store, address: str, size: int, seconds: float) -> None:
        if self._rank == 0:
            self._listener = socket.create_server((address, 0), backlog=size)
            self._selector.register(self._listener, selectors.EVENT_READ)
            store.set(_KEY, json.dumps([*self._listener.getsockname(), self._token.hex()]))
            return
        store.wait([_KEY], timedelta(seconds=seconds))
        host, port, token = json.loads(store.get(_KEY))
        first = connected(host, port, seconds)
        first.sendall(bytes.fromhex(token) + self._rank.to_bytes(_RANK_BYTES, "little"))
        self._add(0, first)

    @property
    def lost(self) -> int | None:
        """A rank that has ended before it has started, or whose `init` has failed; None without one."""
        return self._lost

    def run(self, step: Callable[[], T], seconds: float | None = None) -> T:
        """Return `step()`, which connects this rank to the others.

        seconds: how long the step may take. None: it has a timeout itself.

        Raises HorovodInternalError if a rank has ended, StallError after `seconds`. The step runs in another thread,
        which is abandoned then: it ends at its own timeout.
        """
        outcome: list[tuple[T | None, BaseException | None]] = []

        def work() -> None:
            try:
                outcome.append((step(), None))
            except BaseException as error:
                outcome.append((None, error))
            self._changed.set()

        threading.Thread(target=work, name="dualdist-connect", daemon=True).start()
        while not outcome and self._lost is None:
            if not self._changed.wait(seconds):
                self._find_silent(seconds)
            self._changed.clear()
        cause = outcome[0][1] if outcome else None
        if cause is not None or not outcome:
            self.check(cause)
        if cause is not None:
            raise cause
        return outcome[0][0]  # type: ignore[return-value]

    def check(self, cause: BaseException | None = None) -> None:
        """Raise HorovodInternalError, because of `cause`, if a rank has ended.

        If `cause` may be the consequence of a death, wait a moment for the report.
        """
        if isinstance(cause, (OSError, RuntimeError)):
            self._changed.clear()
            if self._lost is None:
                self._changed.wait(_SETTLE_SECONDS)
        if self._lost is not None:
            what = (
                "did not arrive"
                if self._lost in self._absent
                else "has ended, is stopped, or its init() has failed"
            )
            raise HorovodInternalError(
                f"Rank {self._rank} could not connect to the other ranks: rank {self._lost} {what}. Look at its output."
            ) from cause

    def close(self, *, started: bool) -> None:
        """Stop watching. Safe to call twice. started: whether this rank has started; if not, the others learn it."""
        self._wake.close()
        self._thread.join()
        for peer in self._peers.values():
            with peer, contextlib.suppress(OSError):
                if started:
                    peer.sendall(_STARTED.to_bytes(_RANK_BYTES, "little"))
        self._peers.clear()
        if self._listener is not None:
            self._listener.close()
        self._woken.close()

    def _find_silent(self, seconds: float | None) -> None:
        """Find a rank that does not answer. Raises StallError if all answer."""
        if self._rank == 0:
            self._send(_QUESTION)
            self._changed.wait(_SETTLE_SECONDS)
            silent = self._absent or set(list(self._peers)) - self._answered
            if silent and self._lost is None:
                self._lost = min(silent)
                self._send(self._lost)
        elif not self._changed.wait(3 * _SETTLE_SECONDS):
            self._lost = 0
        if self._lost is None and not self._changed.is_set():
            raise StallError(f"Rank {self._rank} could not connect to the other ranks in {seconds:g} s.")

    def _add(self, rank: int, peer: socket.socket) -> None:
        peer.settimeout(_HELLO_SECONDS)
        self._absent.discard(rank)
        self._peers[rank] = peer
        self._selector.register(peer, selectors.EVENT_READ, rank)

    def _watch(self) -> None:
        with self._selector:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is self._woken:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._read(key.data)

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            peer, _ = self._listener.accept()
            peer.settimeout(_HELLO_SECONDS)
            hello = b""
            with contextlib.suppress(OSError):
                hello = peer.recv(_TOKEN_BYTES + _RANK_BYTES, socket.MSG_WAITALL)
            if hmac.compare_digest(hello[:_TOKEN_BYTES], self._token):
                self._add(int.from_bytes(hello[_TOKEN_BYTES:], "little"), peer)
                if self._lost is not None:
                    self._report()
            else:
                peer.close()

    def _read(self, rank: int) -> None:
        """Read what `rank` sends: which rank has ended, or that it has started. If it closes, it has ended itself."""
        data = b""
        peer = self._peers[rank]
        with contextlib.suppress(OSError):
            data = peer.recv(_RANK_BYTES, socket.MSG_WAITALL)
        number = int.from_bytes(data, "little") if data else rank
        if number == _QUESTION:
            self._answer(rank, peer)
            return
        del self._peers[rank]
        self._selector.unregister(peer)
        peer.close()
        if number != _STARTED and self._lost is None:
            self._lost = number
            self._changed.set()
            self._report()

    def _answer(self, rank: int, peer: socket.socket) -> None:
        if self._rank == 0:
            self._answered.add(rank)
            return
        with contextlib.suppress(OSError):
            peer.sendall(_QUESTION.to_bytes(_RANK_BYTES, "little"))

    def _report(self) -> None:
        """On rank 0, report to the others which rank has ended."""
        if self._rank == 0 and self._lost is not None:
            self._send(self._lost)

    def _send(self, number: int) -> None:
        for peer in list(self._peers.values()):
            with contextlib.suppress(OSError):
                peer.sendall(number.to_bytes(_RANK_BYTES, "little"))
