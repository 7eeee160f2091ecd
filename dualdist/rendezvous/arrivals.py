"""Which ranks on this host have begun to start: MPI cannot report for whom it waits.

Each rank listens at an abstract address of a Unix socket (unix(7)), which has its job and its local rank. It needs no
file, and the kernel removes it with the process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from ..types import Launch
from .launcher_process import job_digest

__all__ = ("announce", "missing_local_ranks")

_PEER = struct.Struct("3i")
"""Process ID, user and group of the process that listens (SO_PEERCRED)."""
_CONNECT_SECONDS = 1.0

_own: dict[str, socket.socket] = {}
"""The socket of this process, by its address."""


def announce(launch: Launch, env: Mapping[str, str]) -> None:
    """Let the other ranks on this host see that this rank has begun to start. Local. Never raises."""
    if launch.local_rank is None:
        return
    address = _address(launch, env, launch.local_rank)
    if address in _own:
        return
    # OSError: another process of this rank has announced it, or the system is not Linux.
    with contextlib.suppress(OSError), contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(address)
        listener.listen(launch.size)
        _own[address] = listener
        undo.pop_all()


def missing_local_ranks(launch: Launch, env: Mapping[str, str]) -> list[int]:
    """Return the local ranks of this host that have not begun to start, have ended or are stopped. Local."""
    return [rank for rank in range(launch.local_size or 0) if not _runs(_address(launch, env, rank))]


def _address(launch: Launch, env: Mapping[str, str], local_rank: int) -> str:
    return f"\0dualdist-{os.getuid()}-{job_digest(launch, env)}-{local_rank}"


def _runs(address: str) -> bool:
    """Return whether a process listens at `address` and is not stopped."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
        probe.settimeout(_CONNECT_SECONDS)
        probe.connect(address)
        process, user, _ = _PEER.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        # A process that was forked from a dead rank keeps its socket.
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        return user == os.getuid() and state not in "TtZX"
    return False
