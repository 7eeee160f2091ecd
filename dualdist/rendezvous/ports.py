"""A port that is kept free for a server that another process, or a library, starts later."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

__all__ = ("reserved_port",)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port of this machine that the kernel gives to nobody else while the block runs.

    A process can still listen on it: both sockets have SO_REUSEADDR, and this one does not listen (socket(7)).
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])
