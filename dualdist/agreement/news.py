"""Wakes the thread that runs a channel when the script makes a call or begins to wait for one."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

__all__ = ("News",)


class News:
    """A wake-up signal between threads that can be waited for together with sockets."""

    def __init__(self) -> None:
        self._pair: tuple[socket.socket, socket.socket] | None = None
        """The reading and the writing end; made when a thread first waits."""
        self._listening = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[socket.socket]:
        """Yield a socket that becomes readable after `give`. Only one thread at a time may listen."""
        if self._pair is None:
            self._pair = socket.socketpair()
            for end in self._pair:
                end.setblocking(False)
        self._listening = True
        try:
            yield self._pair[0]
        finally:
            self._listening = False

    def give(self) -> None:
        """Wake the thread that listens, if one does."""
        if self._listening and self._pair is not None:
            with contextlib.suppress(OSError):  # full: the thread wakes anyway
                self._pair[1].send(b"\0")

    def clear(self) -> None:
        """Forget the signals until now."""
        if self._pair is not None:
            with contextlib.suppress(BlockingIOError):
                while self._pair[0].recv(4096):
                    pass

    def close(self) -> None:
        """Free the sockets. Local, also in a forked process."""
        for end in self._pair or ():
            end.close()
        self._pair = None
