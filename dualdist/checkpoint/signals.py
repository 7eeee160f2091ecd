"""Signals that announce the end of a job: recorded when they arrive, handled between two steps.

Launchers and schedulers often signal a rank's children, too. They have the former handlers. But daemonic processes of
multiprocessing that start during the watch, such as workers of a DataLoader or a Pool, and those of an executor,
outlive the signals until this process terminates them or ends the watch, because the rank needs them for its step.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess, ForkServerProcess, SpawnProcess
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch

from ..core.checks import integer, items, wrong

_NOT_HANDLED = (signal.SIGKILL, signal.SIGSTOP)
"""Signals for which the system allows no handler."""


def check_signals(signals: Any) -> None:
    """Raise TypeError or ValueError unless this thread can install a handler for each of `signals`."""
    fix = "Pass signals such as (signal.SIGTERM,), or ()."
    given = items("signals", signals, "a list of signals", fix)
    for place, signum in enumerate(given):
        name = f"signals[{place}]"
        if integer(name, signum, fix=fix) not in signal.valid_signals() or signum in _NOT_HANDLED:
            raise wrong(name, "a signal that can be handled", int(signum), fix)
    if given and threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "`signals` must be () outside the main thread, but are given. Make the manager in the main thread."
        )


class SignalWatch:
    """Records the last of the signals `numbers` that this process received, instead of ending."""

    def __init__(self, numbers: Sequence[int]) -> None:
        """Install the handlers. Only the main thread can do that."""
        self.received = 0
        """The number of the received signal; 0: none."""
        self.started_before = multiprocessing.active_children()
        self.previous: dict[int, Any] = {signum: signal.signal(signum, self._note) for signum in numbers}
        """The former handlers; empty after `end`."""
        self.ends: dict[BaseProcess, Connection] = {}
        """Pipes to the processes. Only this process has these ends, so a closed one, or its own end, can be noticed."""
        if numbers:
            _watches.append(self)
            _all_watched.update(numbers)
            BaseProcess.start = _start  # type: ignore[assignment, method-assign]
            atexit.register(self._ignore)

    def end(self) -> None:
        """Install the former signal handlers again, where the script has set no others since."""
        if not self.previous:
            return
        for signum, handler in self.previous.items():
            if signal.getsignal(signum) == self._note:
                signal.signal(signum, handler)
            for watch in _watches:  # a later one, which ends later
                if watch.previous.get(signum) == self._note:
                    watch.previous[signum] = handler
        self.previous = {}
        self.release()
        _watches.remove(self)
        atexit.unregister(self._ignore)

    def release(self) -> None:
        """Let the signals end the children, too, also those that they have got already."""
        for end in self.ends.values():
            end.close()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received = signum

    def _ignore(self) -> None:
        self.release()
        # Python removes its handlers long before a process with torch has ended.
        for signum in self.previous:
            signal.signal(signum, signal.SIG_IGN)


_start_process = BaseProcess.start


def _start(process: BaseProcess) -> None:
    """Start `process` with the watched signals blocked until it runs. A daemonic one has `_take_signals`."""
    numbers = {signum for watch in _watches for signum in watch.previous}
    is_default = not isinstance(process, ForkProcess | SpawnProcess | ForkServerProcess)
    forks = isinstance(process, ForkProcess) or (is_default and multiprocessing.get_start_method() == "fork")
    if not numbers and forks:
        return _start_process(process)
    own = vars(process).get("run")
    run = own or functools.partial(type(process).run, process)
    watched = None
    in_executor = getattr(getattr(process, "_target", None), "__module__", "") == "concurrent.futures.process"
    if numbers and (process.daemon or in_executor):
        ends = _watches[-1].ends
        for child in ends.keys() - set(multiprocessing.active_children()):
            ends.pop(child).close()
        watched, ends[process] = multiprocessing.Pipe(duplex=False)
    vars(process)["run"] = functools.partial(_run, run, tuple(_all_watched), watched)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        if not forks:
            resource_tracker.ensure_running()  # it unblocks signals when it starts
            signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        _start_process(process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        vars(process).pop("run")
        vars(process).update({"run": own} if own else {})
    if watched is not None:
        watched.close()
        vars(process)["terminate"] = functools.partial(_terminate, ends[process], process.terminate)


def _terminate(end: Connection, terminate: Callable[[], None]) -> None:
    end.close()
    terminate()


def _run(run: Callable[[], object], numbers: Sequence[int], watched: Connection | None) -> None:
    """Run a child process, in which `numbers` are blocked, since it or the server that forks was started so."""
    unblock = functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, numbers)
    if watched is not None:
        os.register_at_fork(after_in_child=unblock)
        threading.Thread(target=_take_signals, args=(numbers, watched), daemon=True).start()
    else:
        unblock()
    run()


def _take_signals(numbers: Sequence[int], watched: Connection) -> None:
    """Let `numbers` end this process only when the process that has started it terminates it or needs it no longer."""
    watched.poll(None)  # until that process closes its end
    if torch.utils.data.get_worker_info() is not None:
        signal.sigwait(numbers)
        os._exit(0)  # as torch's handler (torch/csrc/DataLoader.cpp, handler_SIGTERM)
    for number in sorted(numbers, reverse=True):  # of those that have arrived, SIGTERM before SIGUSR1
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    threading.Event().wait()  # they are blocked in all other threads


_watches: list[SignalWatch] = []
"""Those of this process whose handlers are installed."""
_all_watched: set[int] = set()
"""The signals of all watches so far."""
_forking = threading.local()


def _before_fork() -> None:
    # A signal must not reach the child before its handlers are the former ones.
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _all_watched)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    for watch in _watches[::-1]:
        watch.end()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
