"""A process between a program and its PMI-1 process manager, from the end of a meeting to the end of the program.

    python pmi_relay.py MANAGER PROGRAM [PARENT]

MANAGER and PROGRAM are the descriptors of two connected sockets. PARENT is that of a process that has started this
program, and may start others for which it keeps the connection: a shell.

If a process has used PMI-1 and ends without "finalize", hydra kills the others of its host (pmip_cb.c, pmi_cb). After
"finalize", the process cannot use PMI again, so MPI could not start in it. Whether a program starts MPI is known only
when it ends. So the relay passes all else on, and sends "finalize" when a program has ended that has not used PMI.
Otherwise it only closes the connection. While a shell has the connection, too, its next program can meet the others
again. So the relay keeps a "finalize" for itself, and one of the shell's relays sends it when the shell has ended.

This file imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import subprocess
import sys
from pathlib import Path


def start(manager: socket.socket, descriptor: int) -> None:
    """Connect `descriptor`, from now on, to a relay in a new process. Local.

    manager: the connection to the process manager. The caller closes it.
    """
    program, other = socket.socketpair()
    with contextlib.ExitStack() as stack:
        ends = [manager.fileno(), stack.enter_context(other).fileno()]
        stack.enter_context(program)
        if parent := _parent_with(manager, descriptor):
            ends.append(os.pidfd_open(parent))
            stack.callback(os.close, ends[-1])
        subprocess.run(
            [sys.executable, "-E", "-s", "-S", __file__, *map(str, ends)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=ends,
            start_new_session=True,  # without this process's signals
            check=True,
        )
        os.dup2(program.fileno(), descriptor)


def _parent_with(manager: socket.socket, descriptor: int) -> int | None:
    """Return the furthest ancestor that has the connection as `descriptor`, too; None if no parent has."""
    found, pid, own = None, os.getppid(), os.fstat(manager.fileno()).st_ino
    with contextlib.suppress(OSError):  # of another user
        while os.stat(f"/proc/{pid}/fd/{descriptor}").st_ino == own:
            found, pid = pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


_END = b"cmd=finalize\n"


def relay(manager: socket.socket, program: socket.socket) -> bool:
    """Pass bytes on until one of the two closes. Return whether it was the program, which had sent nothing.

    "finalize" is answered here: the program then counts as one that has sent nothing.
    """
    has_sent = False
    with selectors.DefaultSelector() as selector:
        selector.register(manager, selectors.EVENT_READ, program)
        selector.register(program, selectors.EVENT_READ, manager)
        while True:
            for key, _ in selector.select():
                source, target = key.fileobj, key.data
                part = source.recv(1 << 16)  # type: ignore[union-attr]
                if not part:
                    return source is program and not has_sent
                if part == _END:
                    source.sendall(b"cmd=finalize_ack\n")  # type: ignore[union-attr]
                    has_sent = False
                    continue
                has_sent |= source is program
                target.sendall(part)


def main(manager: socket.socket, program: socket.socket, parent: int | None = None) -> None:
    """Relay, and say "finalize" for a program that has not used PMI."""
    if not relay(manager, program):
        return
    with socket.socket(socket.AF_UNIX) as mark:
        # OSError: another relay of this connection waits. The last program of a shell may have taken its process.
        mark.bind(f"\0dualdist-pmi-{os.fstat(manager.fileno()).st_ino}")
        if parent is not None:
            select.select([parent], [], [])
        manager.sendall(_END)
        manager.recv(4096)  # wait for the answer: a manager that cannot send it fails


if __name__ == "__main__":
    # A child of the program's process would surprise a program that waits for all its children.
    if os.fork() == 0:
        with contextlib.suppress(OSError):
            to_manager, to_program, *parents = map(int, sys.argv[1:])
            main(socket.socket(fileno=to_manager), socket.socket(fileno=to_program), *parents)
