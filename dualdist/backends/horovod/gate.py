"""Waits until Horovod accepts an operation, in a way that does not block the process.

Horovod starts an operation under the mutex of its table of process sets, and keeps Python's global lock meanwhile. With
HOROVOD_DYNAMIC_PROCESS_SETS its background thread holds the same mutex while it waits for the other ranks
(horovod/common/process_set.cc:183-192). When one of these is stopped, the process would stop, too, until Gloo's
timeout: no thread could answer questions about this rank. Therefore another thread locks the mutex first, without
Python's global lock. Between two cycles of Horovod, that takes less than a millisecond.
"""

from __future__ import annotations

import contextlib
import queue
import threading

from .installed import real_horovod
from .patience import Patience

with real_horovod():
    import horovod.torch as hvd

__all__ = ("await_gate",)

_CHECK_SECONDS = 0.1


class _Gate:
    """Locks and unlocks the mutex in a thread of its own."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._answered: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._number = self._seen = 0
        self.thread = threading.Thread(target=self._serve, name="dualdist-horovod", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            number = self._asked.get()
            hvd.mpi_ops._basics.MPI_LIB_CTYPES.horovod_number_of_process_sets()  # locks the mutex
            self._answered.put(number)

    def wait(self, patience: Patience) -> None:
        self._number += 1
        number = self._number
        self._asked.put(number)
        while self._seen < number:  # a signal handler may see the answer first
            with contextlib.suppress(queue.Empty):
                self._seen = max(self._seen, self._answered.get(timeout=_CHECK_SECONDS))
                continue
            patience.check()


_gate: _Gate | None = None
_one_at_a_time = threading.RLock()
"""Reentrant: a signal handler may make a collective while this thread waits."""


def await_gate(patience: Patience) -> None:
    """Wait until Horovod accepts an operation. Raises what `patience` raises."""
    global _gate
    with _one_at_a_time:
        if _gate is None or not _gate.thread.is_alive():  # a forked process has no threads
            _gate = _Gate()
        _gate.wait(patience)
