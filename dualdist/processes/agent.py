"""The agent: the program that runs on each host, starts that host's processes, and leaves none of them behind.

The launcher starts one agent per host, here or over ssh, and talks to it through its standard input and output. The
end of its input means that the launcher or the connection is gone; then the agent ends its processes. It adopts the
orphans among its descendants (PR_SET_CHILD_SUBREAPER), so it also finds daemons that left their session. Its parent
only waits for its end, and kills what it leaves behind if it is killed or stopped.

The launcher sends the source of this file to the host's interpreter, so the host needs only Python. Therefore this
file imports the standard library alone. See job.py for the launcher's side.

The launcher grants a number of bytes of output. When the agent has sent that many, it stops reading from the processes
until it receives another grant. Meanwhile their writes block, as in a shell's pipe. The launcher always reads what an
agent sends, so it always learns that a process has ended.

If rank 0 is not on the launcher's host, its agent asks for a piece of the launcher's standard input (INPUT), and for
the next one when rank 0's pipe has taken it. If rank 0 does not read, one piece waits, and the agent asks for no more.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from typing import IO, Any, NoReturn

STARTED, STDOUT, STDERR, RESULT, ENDED, INPUT, LOST = range(7)
"""Kinds of messages. The launcher itself reports LOST, of the processes of a host that it cannot reach any more."""
HEADER = struct.Struct("!BII")
"""(kind of message, rank of the process, length of the data that follows)"""

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)

_CHUNK = 1 << 16
_GRACE_SECONDS = 3.0
"""Between SIGTERM and SIGKILL when the launcher is gone, and for what the processes leave behind."""
_POLL_SECONDS = 0.02
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SIOCGIFADDR = 0x8915
"""Of <linux/sockios.h>."""


def main() -> None:
    """Read the request from the standard input and carry it out."""
    length = int(sys.stdin.buffer.readline())
    request = json.loads(sys.stdin.buffer.read(length))
    task = None
    if request["task"] is not None:
        task = os.memfd_create("task")
        with open(task, "wb", closefd=False) as file:
            file.write(sys.stdin.buffer.read(request["task"]))
    agent = Agent(request, task)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if request["parent"] is not None:
        _end_with(request["parent"])
    keeper, (reader, writer) = os.getpid(), os.pipe()
    worker = os.fork()
    if worker:
        os.close(writer)
        _keep(worker, reader)
    _end_with(keeper)
    try:
        agent.run()
    except BaseException as error:
        if not isinstance(error, BrokenPipeError):  # else the launcher is gone
            traceback.print_exc()
        agent.leave()
    # A normal exit would wait for the thread that still reads the standard input.
    os._exit(0)


class Agent:
    """Runs the processes of `request`, a dictionary made by job.py:AgentConnection.

    task: an open file for every process, or None. Such a process gets two more arguments: the number of this file, and
    that of a pipe. What it writes to the pipe is sent to the launcher as RESULT.
    """

    def __init__(self, request: dict[str, Any], task: int | None) -> None:
        self._request = request
        self._task = task
        self._selector, self._idle = selectors.DefaultSelector(), selectors.DefaultSelector()
        """What to wait for. While the grant is used up, the processes' output is not read: the second lacks it."""
        self._running: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
        """process id -> (rank, process)"""
        self._pipes: dict[int, list[tuple[int, IO[bytes]]]] = {}
        """rank -> [(kind, pipe)]"""
        self._granted, self._sent = int(request["window"]), 0
        """How many bytes of output the launcher has granted in total, and how many were sent to it."""
        self._stdin: IO[bytes] | None = None
        """The pipe to the standard input of rank 0, if it is here and the launcher sends what is written to it."""
        self._input: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        """The piece of the launcher's standard input that has arrived; an empty one is its end."""
        self._sending = threading.Lock()
        self._wake_reader, self._wake_writer = os.pipe()
        self._leaving = threading.Lock()

    def run(self) -> None:
        """Start the processes and return when none is left."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._take_signals()
        write_all(1, self._request["token"].encode())
        for rank in self._request["own_env"]:
            self._start(int(rank))
        self._thread(self._listen)
        if self._stdin is not None:
            self._thread(partial(self._pass_input, self._stdin))
        while self._running:
            self._pass_on()
        self._end_rest(_GRACE_SECONDS)
        self._reap()
        for rank in list(self._pipes):
            self._drain(rank)

    def _take_signals(self) -> None:
        """Take signals as the launcher does, and call `leave` at the alarm. Wake the selector when a child ends.

        A scheduler that signals all processes of a job also signals agents. They still report how the processes end.
        """
        signal.signal(signal.SIGALRM, lambda *_: self._thread(self.leave))
        for number in PASSED_SIGNALS:
            signal.signal(number, lambda number, _: _signal(list(self._running), number))
        for number in ENDING_SIGNALS:
            signal.signal(number, lambda number, _: self._thread(partial(self._end_rest, grace_of(number), number)))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*ENDING_SIGNALS, *PASSED_SIGNALS))
        for end in (self._wake_reader, self._wake_writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for selector in (self._selector, self._idle):
            selector.register(self._wake_reader, selectors.EVENT_READ, None)

    def _start(self, rank: int) -> None:
        env, threads = self._environment(rank)
        stdout, stderr = self._request["output"] or (subprocess.PIPE, subprocess.PIPE)
        argv = [_bytes(argument) for argument in self._request["argv"]]
        files = [] if self._task is None else [self._task, *os.pipe()]
        passed = files[::2]
        try:
            child = subprocess.Popen(
                [*argv, *(b"%d" % file for file in passed)],
                env=env,
                cwd=_bytes(self._request["cwd"]),
                stdin=subprocess.DEVNULL if rank else self._request["stdin"],
                stdout=stdout,
                stderr=stderr,
                bufsize=0,
                start_new_session=True,
                pass_fds=passed,
                preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        except (OSError, ValueError) as error:  # ValueError: a null byte
            code = 126 if isinstance(error, PermissionError) else 127  # as in a shell
            name, reason = getattr(error, "filename", None), getattr(error, "strerror", None)
            text = str(error) if name is None else f"{reason}: {os.fsdecode(name)}"
            self._report(ENDED, rank, {"code": code, "time": time.monotonic(), "error": text})
            return
        self._running[child.pid] = (rank, child)
        self._stdin = self._stdin or child.stdin
        self._pipes[rank] = []
        result: IO[bytes] | None = None
        if files:
            result = open(files[1], "rb", 0)
            os.close(files[2])
        for kind, pipe in ((STDOUT, child.stdout), (STDERR, child.stderr), (RESULT, result)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._pipes[rank].append((kind, pipe))
                self._selector.register(pipe, selectors.EVENT_READ, (rank, kind, pipe))
        self._report(STARTED, rank, {"pid": child.pid, "threads": threads})

    def _environment(self, rank: int) -> tuple[dict[bytes, bytes], int | None]:
        """Return the environment of a process, and its OMP_NUM_THREADS if it is set here."""
        variables = self._request["env"] | self._request["own_env"][str(rank)]
        env = {_bytes(name): _bytes(value) for name, value in variables.items()}
        if self._request["inherit"]:
            env = {**os.environb, **env}
        if self._request["address"] is not None and b"DUALDIST_COPIES" in env:
            _add_interface(env, self._request["address"])
        if env.get(b"OMP_NUM_THREADS"):
            return env, None
        threads = max(1, len(os.sched_getaffinity(0)) // len(self._request["own_env"]))
        return env | {b"OMP_NUM_THREADS": b"%d" % threads}, threads

    def _pass_on(self) -> None:
        """Send what the processes have written, and report those that have ended."""
        selector = self._idle if self._sent >= self._granted else self._selector
        # Reaping closes pipes, so it is last.
        for key, _ in sorted(selector.select(), key=lambda ready: ready[0].data is None):
            if key.data is not None:
                self._copy(*key.data)
                continue
            with contextlib.suppress(BlockingIOError):
                os.read(key.fd, _CHUNK)
            self._reap()

    def _copy(self, rank: int, kind: int, pipe: IO[bytes]) -> int:
        """Send one chunk of a process's output. Return its length, 0 when there is none now."""
        data = pipe.read(_CHUNK)
        if data:
            self._send(kind, rank, data)
            self._sent += len(data)
            return len(data)
        if data is not None:  # the end of it
            self._selector.unregister(pipe)
            self._pipes[rank].remove((kind, pipe))
            pipe.close()
        return 0

    def _drain(self, rank: int) -> None:
        """Send what a process has left in its pipes. Not more: its children may still write to them."""
        for kind, pipe in list(self._pipes[rank]):
            count = int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)
            while count > 0 and (length := self._copy(rank, kind, pipe)):
                count -= length

    def _reap(self) -> None:
        """Report each process that has ended, after the last of its output. Adopted orphans are not reported."""
        with contextlib.suppress(ChildProcessError):  # none is left
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if pid in self._running:
                    rank, child = self._running.pop(pid)
                    # Popen would wait for the process again if it did not know the code.
                    child.returncode = os.waitstatus_to_exitcode(status)
                    self._drain(rank)
                    self._report(ENDED, rank, {"code": child.returncode, "time": time.monotonic(), "error": None})

    def _report(self, kind: int, rank: int, facts: dict[str, Any]) -> None:
        self._send(kind, rank, json.dumps(facts).encode())

    def _send(self, kind: int, rank: int, data: bytes) -> None:
        """Send a message to the launcher. Two threads do this."""
        with self._sending:
            write_all(1, HEADER.pack(kind, rank, len(data)) + data)

    def _pass_input(self, stdin: IO[bytes]) -> None:
        """Ask for pieces of the launcher's standard input and write them to `stdin`, until the end of either.

        Runs in its own thread, because a write blocks while the process does not read.
        """
        with contextlib.suppress(BrokenPipeError), stdin:
            while True:
                self._send(INPUT, 0, b"")
                if not (data := self._input.get()):
                    return
                write_all(stdin.fileno(), data)

    def _listen(self) -> None:
        """Follow the launcher's commands: an empty line (it is alive), or a command with numbers.

        'grant BYTES', 'signal NUMBER' (pass it on), 'end NUMBER GRACE' (as `_end_rest`), 'kill', or 'input BYTES' and
        then this number of bytes.

        The alarm, which ends the agent, is put off by each of them.
        """
        silence = self._request["silence"]
        signal.setitimer(signal.ITIMER_REAL, silence)
        for line in sys.stdin.buffer:
            signal.setitimer(signal.ITIMER_REAL, silence)
            match line.split():
                case [b"grant", count]:
                    self._granted += int(count)
                    with contextlib.suppress(BlockingIOError):
                        os.write(self._wake_writer, b"\0")
                case [b"signal", number]:
                    _signal(list(self._running), int(number))
                case [b"end", number, grace]:
                    self._thread(partial(self._end_rest, float(grace), int(number)))
                case [b"kill"]:
                    self._end_rest(0.0)
                case [b"input", length]:
                    self._input.put(sys.stdin.buffer.read(int(length)))
        self.leave()

    def leave(self) -> NoReturn:
        """End all processes and this one, because the launcher is gone."""
        with self._leaving:
            self._end_rest(_GRACE_SECONDS)
            os._exit(1)

    def _end_rest(self, grace: float, number: int = signal.SIGTERM) -> None:
        """Send signal `number` to the processes, then to their descendants; after `grace` seconds SIGKILL to all.

        The descendants get it when no process is left: a process that saves its state may need them. Ctrl-C goes to all
        at once, as in a terminal.
        """
        deadline = time.monotonic() + grace
        signalled: set[int] = set()
        while alive := _descendants():
            if time.monotonic() >= deadline:
                _kill(alive)
            else:
                first = set() if number == signal.SIGINT else alive.keys() & set(self._running)
                chosen = first or set(alive)
                _signal(chosen - signalled, number)
                signalled |= chosen
            time.sleep(_POLL_SECONDS)

    @staticmethod
    def _thread(target: Callable[[], object]) -> None:
        threading.Thread(target=target, daemon=True).start()


def grace_of(number: int) -> float:
    """Return how many seconds a process has between signal `number` and SIGKILL.

    A scheduler's SIGTERM gives time to save; Slurm's KillWait and torchrun's are as long.
    """
    return 30.0 if number == signal.SIGTERM else 4.0


def _end_with(parent: int) -> None:
    """Receive SIGALRM when this process's parent, which was `parent`, ends: the agent's signal to leave."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGALRM)
    if os.getppid() != parent:
        os._exit(1)


def _keep(worker: int, ended: int) -> NoReturn:
    """Wait until the process `worker`, which runs the agent, ends, and kill what is left of its descendants.

    At the end of the input, it has some seconds to end. ended: a pipe that closes when it ends.
    """
    os.close(1)  # the launcher waits for the worker to close it
    events = select.poll()
    events.register(ended, 0)
    events.register(0, select.POLLRDHUP)
    if ended not in dict(events.poll()):
        events.unregister(0)
        events.poll(1000 * (_GRACE_SECONDS + 1))
    status = 0
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            _kill(_descendants(ended=True))
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                status = child[1] if child[0] == worker else status
            time.sleep(_POLL_SECONDS)
    os._exit(1 if status else 0)


def _kill(groups: dict[int, int]) -> None:
    """Kill the processes `groups`, a dictionary made by _descendants.

    The members of a process group are killed at once, so that none can start another one meanwhile.
    """
    _signal([-group if group > 1 else pid for pid, group in groups.items()], signal.SIGKILL)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _descendants(*, ended: bool = False) -> dict[int, int]:
    """Return the process group of each of this process's children, their children and so on, by their ids.

    The group is 0 where others may be in it, too: in the session of this process, and in another PID namespace.

    ended: also of those that have ended and are not waited for yet. They show the groups of what they have started.
    """
    own = os.getsid(0)
    parents: dict[int, tuple[int, int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                state, parent, group, session = stat.read().rpartition(b")")[2].split()[:4]
                if ended or state not in (b"Z", b"X"):
                    parents[int(name)] = int(parent), int(group) if int(session) != own else 0
    found: dict[int, int] = {}
    level = {os.getpid()}
    while level:
        children = {pid: group for pid, (parent, group) in parents.items() if parent in level}
        level = children.keys() - found.keys()
        found |= children
    return found


def _add_interface(env: dict[bytes, bytes], address: str) -> None:
    """Set the interfaces of Horovod's Gloo and, if unset, of torch's. Record them as copies (copies.py).

    The value is the first existing interface of DUALDIST_INTERFACE, else that towards the launcher's `address`.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        own = socket.inet_aton(probe.getsockname()[0])
        names = [name for _, name in socket.if_nameindex()]
        wanted = [name for name in env.get(b"DUALDIST_INTERFACE", b"").decode().split(",") if name in names]
        wanted += [name for name in names if _address(probe, name) == own]
        variables = [b"HOROVOD_GLOO_IFACE"] * (b"HOROVOD_GLOO_RENDEZVOUS_ADDR" in env)
        variables += [b"GLOO_SOCKET_IFNAME"] * (not env.get(b"GLOO_SOCKET_IFNAME"))
        for variable in variables if wanted else []:
            env[variable] = wanted[0].encode()
            env[b"DUALDIST_COPIES"] += b" %b=%b" % (variable, env[variable])


def _address(probe: socket.socket, interface: str) -> bytes | None:
    with contextlib.suppress(OSError):  # it has no IPv4 address
        return fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))[20:24]
    return None


def _bytes(text: str) -> bytes:
    """Undo job.py:_portable."""
    return text.encode("latin-1")


def write_all(descriptor: int, data: bytes) -> None:
    """Write `data`, which may take several writes."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _prctl(option: int, value: int) -> None:
    # Without prctl, the agent does not find descendants whose parent has ended.
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
