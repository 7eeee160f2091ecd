"""What watches the processes of one host: it starts them, passes on what they say, and leaves none of them behind.

The launcher runs it once per host, here or over ssh, and talks to it through its standard input and output. The end
of its input means that the launcher or the connection is gone, however that came about; then it ends its processes.
It takes in whatever they have started (PR_SET_CHILD_SUBREAPER), so that also a daemon that left its session is found.

The source of this file is sent to the interpreter, so that a host needs no more than Python; it imports the standard
library alone. See supervisor.py for the other end.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

__all__ = ("ENDED", "HEADER", "STARTED", "STDERR", "STDOUT", "main")

STARTED, STDOUT, STDERR, ENDED = range(4)
HEADER = struct.Struct("!BII")
"""(kind, index of the process, length of what follows)"""

_CHUNK = 1 << 16
_GRACE_SECONDS = 3.0
"""Between SIGTERM and SIGKILL when nobody is left who could say how long."""
_LOOK_SECONDS = 0.02
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    """Read the specification from the standard input, then do it."""
    length = int(sys.stdin.buffer.readline())
    shim = Shim(json.loads(sys.stdin.buffer.read(length)))
    try:
        shim.run()
    except BrokenPipeError:  # the launcher is gone
        shim.leave()
    except BaseException:
        traceback.print_exc()
        shim.leave()
    os._exit(0)  # a thread still reads the standard input, which the interpreter's end would wait for


class Shim:
    """The processes of `spec`; see supervisor.py:Spec for its fields."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}  # process id -> (index, process)
        self._pipes: dict[int, list[tuple[int, int]]] = {}  # index -> [(file, kind)]
        self._heard = time.monotonic()
        self._leaving = threading.Lock()

    def run(self) -> None:
        """Start the processes and stay until none is left."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if self._spec["parent"] is not None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != self._spec["parent"]:
                return
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda *_: self._thread(self.leave))
        wake, wakened = os.pipe()
        for end in (wake, wakened):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wakened, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(wake, selectors.EVENT_READ, None)
        _write_all(self._spec["token"].encode())
        for index in range(len(self._spec["processes"])):
            self._start(index)
        for descriptor in {fd for process in self._spec["processes"] for fd in process["fds"]}:
            os.close(descriptor)
        self._thread(self._listen)
        if self._spec["silence"] is not None:
            self._thread(self._watch)
        while self._running:
            self._pass_on()
        self._end_rest(_GRACE_SECONDS)
        self._reap()
        for index in list(self._pipes):
            self._drain(index)

    def _start(self, index: int) -> None:
        process = self._spec["processes"][index]
        env = {_bytes(name): _bytes(value) for name, value in (self._spec["env"] | process["env"]).items()}
        if self._spec["inherit"]:
            env = {**os.environb, **env}
        threads = max(1, len(os.sched_getaffinity(0)) // len(self._spec["processes"]))
        default = b"OMP_NUM_THREADS" not in env
        env.setdefault(b"OMP_NUM_THREADS", b"%d" % threads)
        streams = [(STDOUT, subprocess.PIPE), (STDERR, subprocess.PIPE)]
        if self._spec["output"] is not None:
            streams = list(zip((STDOUT, STDERR), self._spec["output"], strict=True))
        try:
            child = subprocess.Popen(
                [_bytes(argument) for argument in process["argv"]],
                env=env,
                cwd=_bytes(self._spec["cwd"]),
                stdin=subprocess.DEVNULL,
                stdout=streams[0][1],
                stderr=streams[1][1],
                start_new_session=True,
                pass_fds=process["fds"],
                preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        except (OSError, ValueError) as error:  # ValueError: a null byte
            code = 126 if isinstance(error, PermissionError) else 127  # as in a shell
            self._tell(ENDED, index, {"code": code, "time": time.monotonic(), "error": _told(error)})
            return
        self._running[child.pid] = (index, child)
        self._pipes[index] = []
        for (kind, _), pipe in zip(streams, (child.stdout, child.stderr), strict=True):
            if pipe is not None:
                descriptor = os.dup(pipe.fileno())
                pipe.close()
                os.set_blocking(descriptor, False)
                self._pipes[index].append((descriptor, kind))
                self._selector.register(descriptor, selectors.EVENT_READ, (index, kind))
        self._tell(STARTED, index, {"pid": child.pid, "threads": threads if default else None})

    def _pass_on(self) -> None:
        ready = [key for key, _ in self._selector.select()]
        for key in ready:
            if key.data is not None:
                self._copy(key.fd, *key.data)
        for key in ready:
            if key.data is None:  # comes last, since it closes pipes
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, _CHUNK)
                self._reap()

    def _copy(self, descriptor: int, index: int, kind: int) -> bool:
        """Pass on what is there; return whether more may be."""
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            _write_all(HEADER.pack(kind, index, len(data)) + data)
            return True
        self._selector.unregister(descriptor)
        self._pipes[index].remove((descriptor, kind))
        os.close(descriptor)
        return False

    def _drain(self, index: int) -> None:
        for descriptor, kind in list(self._pipes[index]):
            while self._copy(descriptor, index, kind):
                pass

    def _reap(self) -> None:
        """Tell who has ended, after the last that it said. Whoever was adopted is just forgotten."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._running:
                index, child = self._running.pop(pid)
                child.returncode = os.waitstatus_to_exitcode(status)  # or it would wait for itself
                self._drain(index)
                self._tell(ENDED, index, {"code": child.returncode, "time": time.monotonic(), "error": None})

    def _tell(self, kind: int, index: int, fact: dict[str, Any]) -> None:
        data = json.dumps(fact).encode()
        _write_all(HEADER.pack(kind, index, len(data)) + data)

    def _listen(self) -> None:
        """Do what the launcher says: nothing (it is alive), 'end SIGNAL GRACE', or 'kill'."""
        for line in sys.stdin.buffer:
            self._heard = time.monotonic()
            words = line.split()
            if words[:1] == [b"end"]:
                number, grace = int(words[1]), float(words[2])
                self._thread(partial(self._end_rest, grace, number))
            elif words[:1] == [b"kill"]:
                self._end_rest(0.0)
        self.leave()

    def _watch(self) -> None:
        silence = float(self._spec["silence"])
        while (left := self._heard + silence - time.monotonic()) > 0:
            time.sleep(left)
        self.leave()

    def leave(self) -> NoReturn:
        """End everything: nobody is left who would want it."""
        with self._leaving:
            self._end_rest(_GRACE_SECONDS)
            os._exit(1)

    def _end_rest(self, grace: float, number: int = signal.SIGTERM) -> None:
        """Send `number` to every process below this one, and SIGKILL to those that are left after `grace` seconds."""
        deadline = time.monotonic() + grace
        told: set[int] = set()
        while alive := _descendants():
            late = time.monotonic() >= deadline
            for pid in alive if late else alive - told:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL if late else number)
            told |= alive
            time.sleep(_LOOK_SECONDS)

    @staticmethod
    def _thread(target: Callable[[], object]) -> None:
        threading.Thread(target=target, daemon=True).start()


def _descendants() -> set[int]:
    """Return the processes that this one or its children have started, without those that have ended."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                state, parent = stat.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    parents[int(name)] = int(parent)
    found: set[int] = set()
    level = {os.getpid()}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level} - found
        found |= level
    return found


def _told(error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {os.fsdecode(error.filename)}"
    return str(error)


def _bytes(text: str) -> bytes:
    """Undo supervisor.py:portable."""
    return text.encode("latin-1")


def _write_all(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(
        ImportError, OSError, AttributeError
    ):  # without it, orphans of orphans are missed
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
