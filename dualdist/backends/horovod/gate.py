"""Finds out when Horovod accepts an operation, in a way that does not block the process.

Horovod starts an operation under the mutex of its table of process sets, and keeps Python's global lock meanwhile. With
HOROVOD_DYNAMIC_PROCESS_SETS its background thread holds the same mutex while it waits for the other ranks
(horovod/common/process_set.cc:183-192). When one of these is stopped, the process would stop, too, until Gloo's
timeout: no thread could answer questions about this rank. Therefore another thread locks the mutex first, without
Python's global lock. Between two cycles of Horovod, that takes less than a millisecond.

The thread that starts the operation can still stop if another rank is lost between the answer and the start.

A Horovod that was built by ci/install-horovod keeps neither of the two while it waits for other ranks, so that nobody
needs to ask. Only while it connects a new process set does the mutex stay locked: then the gate is closed.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator

from .installed import real_horovod
from .repairs import STARTS_WHILE_WAITING, has_repair, horovods_version

with real_horovod():
    import horovod.torch as hvd

__all__ = ("Question", "ask", "closed")


class Question:
    """A question whether Horovod accepts an operation.

    A signal handler may ask another one inside of each call here. After a handler that takes longer than `seconds`,
    SimpleQueue.get(timeout=seconds) would wait for ever; inside of Event.wait, the handler would stop the answers.
    """

    def __init__(self) -> None:
        self._answer = threading.Lock()
        """Locked until there is an answer."""
        self._answer.acquire()
        self._is_known = False

    def answer(self) -> None:
        """Let `has_answered` return True."""
        self._answer.release()

    def has_answered(self, seconds: float) -> bool:
        """Wait at most `seconds`, and return whether there is an answer."""
        if not self._is_known and self._answer.acquire(timeout=seconds):
            self._is_known = True
        return self._is_known


class _Gate:
    """Locks and unlocks the mutex in a thread of its own, once for each question."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Question] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name="dualdist-horovod", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            question = self._asked.get()
            hvd.mpi_ops._basics.MPI_LIB_CTYPES.horovod_number_of_process_sets()  # locks the mutex
            question.answer()

    def ask(self) -> Question:
        question = Question()
        self._asked.put(question)
        return question


_gate: _Gate | None = None
_one_at_a_time = threading.RLock()
"""Reentrant: a signal handler may make a collective while this thread starts one."""
_is_repaired = has_repair(STARTS_WHILE_WAITING, horovods_version())
_closed: set[object] = set()
"""An item for each `closed` block."""
_OPEN = Question()
_OPEN.answer()


def ask() -> Question:
    """Ask when Horovod accepts an operation. Does not wait."""
    global _gate
    if _is_repaired and not _closed:
        return _OPEN
    with _one_at_a_time:
        if _gate is None or not _gate.thread.is_alive():  # a forked process has no threads
            _gate = _Gate()
        return _gate.ask()


@contextlib.contextmanager
def closed() -> Iterator[None]:
    """Ask Horovod before every operation in the block, in which it connects a new process set."""
    key = object()
    _closed.add(key)
    try:
        yield
    finally:
        _closed.discard(key)
