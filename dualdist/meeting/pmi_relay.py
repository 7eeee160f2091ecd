"""A process between a program and its PMI-1 process manager, from the end of a meeting to the end of the program.

    python pmi_relay.py MANAGER PROGRAM        the descriptors of two connected sockets

If a process has used PMI-1 and ends without "finalize", hydra kills the others of its host (pmip_cb.c, pmi_cb). After
"finalize", the process cannot use PMI again, so MPI could not start in it. Whether a program starts MPI is known only
when it ends. So the relay passes everything on, and sends "finalize" when a program has ended and has not used PMI. If
it has used PMI, the relay only closes the connection, as the program itself would have done.

This file imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys


def start(manager: socket.socket, descriptor: int) -> None:
    """Connect `descriptor`, from now on, to a relay in a new process. Local.

    manager: the connection to the process manager. The caller closes it.
    """
    program, other = socket.socketpair()
    with program, other:
        ends = (manager.fileno(), other.fileno())
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


def relay(manager: socket.socket, program: socket.socket) -> bool:
    """Pass bytes on until one of the two closes. Return whether it was the program, which had sent nothing."""
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
                has_sent |= source is program
                target.sendall(part)


def main(manager: socket.socket, program: socket.socket) -> None:
    """Relay, and say "finalize" for a program that has not used PMI."""
    if relay(manager, program):
        manager.sendall(b"cmd=finalize\n")
        manager.recv(4096)  # wait for the answer: a manager that cannot send it fails


if __name__ == "__main__":
    # A child of the program's process would surprise a program that waits for all its children.
    if os.fork() == 0:
        with contextlib.suppress(ConnectionError):
            main(*(socket.socket(fileno=int(number)) for number in sys.argv[1:]))
