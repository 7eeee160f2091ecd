"""The server of forks.py: imports torch and dualdist, and forks for every client (fork_client.py).

    python fork_server.py SOCKET

It prints `ready`, and ends with its forks when its input ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import io
import marshal
import os
import runpy
import select
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMESPACES = ("net", "uts", "mnt")
"""The client passes these after its files."""
FIRST_FREE = 512
"""Files of the client wait at this number and above until their own numbers are free."""


@dataclass
class _Request:
    """What a client wants to run."""

    arguments: list[str]
    environment: dict[bytes, bytes]
    folder: str
    parent: int
    """The process ID of the process that started it."""
    numbers: list[int]
    """The numbers of its files."""
    files: list[int]
    """Copies of its files, and then of its namespaces."""


def _serve(address: str) -> _Request:
    """Fork for every client. Only the forks return."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)
    children: dict[int, tuple[int, socket.socket]] = {}
    """By process handle: process ID and client."""
    watched: list[Any] = [0, listener]
    while True:
        ready, _, _ = select.select([*watched, *children], [], [])
        if 0 in ready:  # pytest has ended, or wants this process to end
            for handle in children:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os._exit(0)
        for handle, (pid, client) in list(children.items()):
            if handle in ready:
                del children[handle]
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with client, contextlib.suppress(OSError):
                    client.sendall(code.to_bytes(4, "big", signed=True))
                os.close(handle)
            elif client in ready:  # it was killed
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            if client in watched and (handle in ready or client in ready):
                watched.remove(client)
        if listener in ready:
            client, _ = listener.accept()
            try:
                request = _receive(client)
            except (OSError, EOFError, ValueError):  # it was killed
                client.close()
                continue
            pid = os.fork()
            if pid == 0:
                return request
            for file in request.files:
                os.close(file)
            with contextlib.suppress(OSError):  # it was killed; its socket becomes readable
                client.sendall(pid.to_bytes(4, "big"))
            children[os.pidfd_open(pid)] = pid, client
            watched.append(client)


def _receive(client: socket.socket) -> _Request:
    length, files, _, _ = socket.recv_fds(client, 4, 250)
    message = b""
    while len(message) < int.from_bytes(length, "big"):
        part = client.recv(1 << 20)
        if not part:
            raise EOFError("the client has ended")
        message += part
    arguments, environment, folder, parent, numbers = marshal.loads(message)
    return _Request(arguments, environment, folder, parent, numbers, files)


def _take_over(request: _Request) -> None:
    """Take the place of the client: its files, namespaces, environment and folder."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, FIRST_FREE) for file in request.files]
    os.closerange(0, FIRST_FREE)
    for file, number in zip(high, request.numbers, strict=False):
        os.dup2(file, number)
    for file, name in zip(high[-len(NAMESPACES) :], NAMESPACES, strict=True):
        if os.path.samestat(os.fstat(file), os.stat(f"/proc/self/ns/{name}")):
            continue
        if ctypes.CDLL(None, use_errno=True).setns(file, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns of {name}")
    os.closerange(FIRST_FREE, max(high) + 1)
    os.environb.clear()
    os.environb.update(request.environment)
    os.chdir(request.folder)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    os.getppid = lambda: request.parent


def _run(arguments: list[str]) -> int:
    """Do what `python ARGUMENTS` does; return the exit code."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    while arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"):
        unbuffered |= arguments.pop(0) == "-u"  # the others are flags of this process, too
    if unbuffered:
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    else:
        sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]
    is_module, is_text = arguments[0] == "-m", arguments[0] == "-c"
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = ["" if is_module or is_text else str(Path(arguments[0]).resolve().parent), *filter(None, path)]
    try:
        if is_text:
            sys.argv = ["-c", *arguments[2:]]
            exec(arguments[1], {"__name__": "__main__"})
        elif is_module:
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(code: int) -> None:
    """End as an interpreter does, but leave the memory to the kernel: C's destructors would take a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def main() -> None:
    import numpy
    import torch._dynamo

    import dualdist

    with contextlib.suppress(ImportError):
        importlib.import_module("sklearn.datasets")  # for examples/train.py
    assert not dualdist.is_initialized()
    del sys.path[0]  # the folder of this file
    gc.collect()
    gc.freeze()  # else the first collection in each fork would copy all memory that is shared with this process
    request = _serve(sys.argv[1])
    _take_over(request)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    numpy.random.seed()
    _end(_run(request.arguments))


if __name__ == "__main__":
    main()
