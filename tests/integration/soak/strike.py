"""Makes the fault happen to a rank at its moment."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import torch

import dualdist as hvd

from .faults import ENDINGS, LINKS, SAVE, Fault

SIGNALS = {name: getattr(signal, name) for name in ("SIGKILL", "SIGTERM", "SIGSTOP")}
CHILD_SECONDS = 20


class Injected(Exception):
    """The exception of the fault "exception"."""


class Strike:
    """The fault as one rank meets it.

    Signals are sent by a timer thread, at any instruction. The other faults run in a signal handler, between any two
    instructions of Python.
    """

    def __init__(self, fault: Fault, rank: int, report: Callable[..., None]) -> None:
        here = (*ENDINGS, *LINKS, "fork", "signal handler")
        self._fault = fault
        self._is_here = rank == fault.rank and fault.kind in here
        self._report = report
        self._is_saving = False
        self._lock = threading.Lock()
        if self._is_here:
            signal.signal(signal.SIGALRM, self._handle)

    @contextlib.contextmanager
    def at(self, place: str, step: int | None = None) -> Iterator[None]:
        """Strike while the body of the `with` runs, at its end at the latest."""
        fault = self._fault
        if not self._is_here or place != fault.place or step not in (None, fault.step):
            yield
            return
        timer = threading.Timer(fault.seconds, self._strike)
        timer.daemon = True
        timer.start()
        self._is_saving = place == SAVE
        yield
        timer.cancel()
        self._strike()

    def in_save(self) -> None:
        """Strike in an operation of the file system, if a checkpoint is being saved where the fault happens."""
        if self._is_saving and random.random() < 0.3:
            self._strike()

    def _strike(self) -> None:
        with self._lock:
            if not self._is_here:
                return
            self._is_here = False
            self._report("struck", "")
        if self._fault.kind in LINKS:
            return  # the soak's own process changes the links
        if self._fault.kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self._fault.kind])
        else:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        kind = self._fault.kind
        if kind == "exception":
            raise Injected
        if kind == "sys.exit":
            sys.exit(3)
        if kind == "fork":
            self._fork()
        else:
            self._call()

    def _call(self) -> None:
        """Call a collective. It raises at once if it interrupts another; else all ranks raise that they differ."""
        try:
            hvd.allreduce(torch.ones(5), name="in a handler")
        except hvd.HorovodInternalError:
            raise
        except RuntimeError as error:
            if "CheckpointManager(signals=)" not in str(error):
                raise

    def _fork(self) -> None:
        """Call a collective in a forked process, where it raises."""
        child = os.fork()
        if child == 0:
            signal.alarm(CHILD_SECONDS)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            try:
                hvd.allreduce(torch.ones(5))
            except RuntimeError:
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == 0, f"the forked process ended with {code}"
