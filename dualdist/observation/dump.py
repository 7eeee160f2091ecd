"""Writes what this rank does to a file, for `dualdist hang`: its last calls, and the stacks of all Python threads.

A rank does so when a call has failed or stalled, when another rank asks for it because of that, and on SIGUSR2. Another
thread writes the file, because the main thread may be stuck.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from ..core.agreement.call import LONGEST_TEXT, Record, is_internal
from ..core.agreement.guard import GAVE_UP
from ..core.process import in_thread
from ..errors import logger
from .survey import ASKED, StallWatch

Place = tuple[str, int, str]
"""File, line and function."""

_WAIT_SECONDS = 2.0
_PAUSE_SECONDS = 1.0
"""Launchers pass a signal on to all ranks, and each of them asks all others."""
_MOST_FOLDERS = 20
"""How many jobs keep their folder below the temporary folder."""
# What faulthandler writes (Python/traceback.c): at most 100 threads and 100 frames of each.
_THREAD = re.compile(r"^(?:Current t|T)hread (?P<ident>0x\w+).*\n(?P<frames>(?:  .*\n)*)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_STANDARD_LIBRARY = re.compile(r".*/lib(64)?/python3\.\d+/(?!(site|dist)-packages/)")


class Dump:
    """The file of this rank."""

    def __init__(self, watch: StallWatch, folder: str | None, job: str) -> None:
        """From now on, write the file when `watch` or SIGUSR2 asks for it.

        folder: None or "" for one below the temporary folder. job: the same text on all ranks, and in no other world.
        """
        self._watch = watch
        self._world = hashlib.sha256(job.encode() if watch.size > 1 else os.urandom(8)).hexdigest()[:8]
        self._folder = os.path.realpath(folder) if folder else None
        self._starting, self._writing = threading.Lock(), threading.Lock()
        self._failure: Future[None] | None = None
        """The file about the first call that failed. What comes later is a consequence, and does not overwrite it."""
        self._next_answer = 0.0
        self._pipe: tuple[int, int] | None = None
        watch.dump = self.start
        watch.main_stack = lambda: next((thread["stack"] for thread in _stacks() if thread["is_main"]), [])
        self._take_signals()

    def start(self, why: str, asked: int) -> Callable[[], str]:
        """Start to write the file; see StallWatch.dump. Returns `str` if this rank was asked a moment ago."""
        with self._starting:
            now, outcome = time.monotonic(), None if why == ASKED else self._failure
            if why == ASKED and now < self._next_answer:
                return str
            try:
                outcome = outcome or in_thread(functools.partial(self._write, why, asked), "dualdist-dump")
            except RuntimeError:  # the interpreter ends
                return str
            if why == GAVE_UP:
                self._failure = outcome
            self._next_answer = now + _PAUSE_SECONDS
        return functools.partial(self._sentence, outcome)

    def _sentence(self, outcome: Future[None]) -> str:
        wait([outcome], _WAIT_SECONDS)  # on a busy machine, the file is there a little later
        if outcome.done() and outcome.exception() is not None:
            logger.warning("This rank's last calls could not be written: %r", outcome.exception())
            return ""
        folder = self._path()
        return (
            f"Each rank that still runs has written its last calls and stacks to {folder} on its host: read them with "
            f"`dualdist hang {folder}`."
        )

    def _path(self) -> Path:
        """Return the folder of the files: the given one, or this job's in that of all jobs."""
        return Path(self._folder or Path(tempfile.gettempdir(), f"dualdist-{os.getuid()}", self._world))

    def _write(self, why: str, asked: int) -> None:
        watch = self._watch
        calls = list(watch.last_calls)  # before the channels: a new one has no call here yet
        channels = list(watch.channels.items())
        found = {
            "world": self._world,
            "why": why,
            "asked": asked,
            "time": time.time_ns(),
            "rank": watch.rank,
            "size": watch.size,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "channels": {name: {"ranks": one.ranks, "agreed": one.num_agreed} for name, one in channels},
            "calls": [_described(record) for record in calls],
            "threads": _stacks(),
            "others": {rank: watch.state(rank) for rank in range(watch.size)},
        }
        with self._writing:
            folder = self._path()
            if self._folder is None:
                _make_private(folder.parent)
                with contextlib.suppress(FileNotFoundError):  # another rank removes them, too
                    jobs = [] if folder.exists() else sorted(folder.parent.iterdir(), key=os.path.getmtime)
                    for oldest in jobs[: 1 - _MOST_FOLDERS]:
                        shutil.rmtree(oldest, ignore_errors=True)
            _make_private(folder)
            path = folder / f"rank-{watch.rank}.part"
            path.unlink(missing_ok=True)
            with path.open("x") as file:  # not through a link of somebody who may write to the folder
                json.dump(found, file, default=repr)
            path.replace(path.with_suffix(".json"))

    # A handler of SIGUSR2 in Python does not run while the main thread is in C, and asyncio uses the only wakeup
    # descriptor. The handler of faulthandler is in C, and writes to a pipe, which wakes the thread of the server.

    def _take_signals(self) -> None:
        if self._watch.server is None:
            return
        lines = Path("/proc/self/status").read_text().splitlines()
        masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigIgn:", "SigCgt:"))]
        if any(mask >> (signal.SIGUSR2 - 1) & 1 for mask in masks):  # ignored, or handled in Python or in C
            return
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)  # the handler must not wait for the thread
        self._watch.server.follow(self._pipe[0], self._on_signal)
        # Without this, it installs nothing after a script has replaced its handler.
        faulthandler.unregister(signal.SIGUSR2)
        faulthandler.register(signal.SIGUSR2, self._pipe[1], all_threads=False)

    def _on_signal(self) -> None:
        asked, pipe = time.time_ns(), self._pipe
        with contextlib.suppress(OSError):  # `close` has closed it
            is_new = pipe is not None and os.read(pipe[0], 1 << 16)
            if is_new and self.start(ASKED, asked) is not str:  # else another rank has asked all of them
                message = ["dump", "", asked]
                in_thread(lambda: self._watch.tell(range(self._watch.size), message), "dualdist-dump-signal")

    def close(self, *, is_forked: bool = False) -> None:
        """Let SIGUSR2 end the process again, unless the script handles it in Python.

        is_forked: in a forked process, which ignores the signal: launchers and Slurm send it to the whole group.
        """
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
                faulthandler.unregister(signal.SIGUSR2)
                if is_forked:
                    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            for end in pipe:
                os.close(end)


def _make_private(folder: Path) -> None:
    """Make `folder` for this user alone. Raises PermissionError if it is there, but belongs to another user."""
    folder.mkdir(0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")


def _described(record: Record) -> dict[str, Any]:
    call = record.call
    return {
        "kind": call.kind.name,
        "event": call.kind.event,
        "name": call.name,
        "arguments": {name: value for name, value in call.arguments if len(repr(value)) <= LONGEST_TEXT},
        "call": str(call)[:LONGEST_TEXT],
        "where": call.site,
        **{name: getattr(record, name) for name in ("channel", "number", "called", "agreed", "ended")},
    }


def _stacks() -> list[dict[str, Any]]:
    """Return the stack of each Python thread, the main thread first."""
    # faulthandler makes no objects of frames: other threads are running them.
    with open(os.memfd_create("stacks"), "w+", errors="replace") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        text = file.read()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    stacks = [
        {"name": names.get(ident, "?"), "is_main": ident == main, "line": line, "stack": stack}
        for ident, line, stack in threads_in(text)
        if stack  # a thread that begins has none, and still the ident of its parent
    ]
    return sorted(stacks, key=lambda thread: not thread["is_main"])


def threads_in(text: str) -> Iterator[tuple[int, Place | None, list[Place]]]:
    """Yield of each thread in what faulthandler has written: its ident, the line of the script, and the stack.

    The stack has the innermost frame first.
    """
    for thread in _THREAD.finditer(text):
        stack = [(name, int(line), function) for name, line, function in _FRAME.findall(thread["frames"])]
        own = (one for one in stack if not is_internal(one[0]) and not _STANDARD_LIBRARY.match(one[0]))
        yield int(thread["ident"], 16), next(own, None), stack
