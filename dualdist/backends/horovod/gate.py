"""Finds out when Horovod accepts an operation, in a way that does not block the process.

Horovod starts an operation under the mutex of its table of process sets, and keeps Python's global lock meanwhile. With
HOROVOD_DYNAMIC_PROCESS_SETS its background thread holds the same mutex while it waits for the other ranks
(horovod/common/process_set.cc:183-192). When one of these is stopped, the process would stop, too, until Gloo's
timeout: no thread could answer questions about this rank. Therefore another thread locks the mutex first, without
Python's global lock. Between two cycles of Horovod, that takes less than a millisecond.

The thread that starts the operation can still stop if another rank is lost between the answer and the start. A Horovod
that was built by ci/install-horovod does not keep Python's global lock then, so that the other threads go on.
"""

from __future__ import annotations

import queue
import threading

from .installed import real_horovod

with real_horovod():
    import horovod.torch as hvd

__all__ = ("ask", "has_answered")


class _Gate:
    """Locks and unlocks the mutex in a thread of its own, once for each question."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._number = self._answered = 0
        self.thread = threading.Thread(target=self._serve, name="dualdist-horovod", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            number = self._asked.get()
            hvd.mpi_ops._basics.MPI_LIB_CTYPES.horovod_number_of_process_sets()  # locks the mutex
            self._answers.put(number)

    def ask(self) -> int:
        self._number += 1
        self._asked.put(self._number)
        return self._number

    def has_answered(self, number: int, seconds: float) -> bool:
        while self._answered < number:  # a signal handler may see the answer first
            try:
                self._answered = max(self._answered, self._answers.get(timeout=seconds))
            except queue.Empty:
                return self._answered >= number
        return True


_gate: _Gate | None = None
_one_at_a_time = threading.RLock()
"""Reentrant: a signal handler may make a collective while this thread waits."""


def ask() -> int:
    """Ask when Horovod accepts an operation, and return the number of the question. Does not wait."""
    global _gate
    with _one_at_a_time:
        if _gate is None or not _gate.thread.is_alive():  # a forked process has no threads
            _gate = _Gate()
        return _gate.ask()


def has_answered(number: int, seconds: float) -> bool:
    """Wait at most `seconds`, and return whether Horovod accepts the operation for which `ask` returned `number`."""
    assert _gate is not None
    with _one_at_a_time:
        return _gate.has_answered(number, seconds)
