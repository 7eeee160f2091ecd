"""A thread that runs one job at a time: the writing of an asynchronous save."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable

__all__ = ("Background",)

logger = logging.getLogger("dualdist")


class Background:
    """Runs one job in a thread beside the caller. The interpreter waits for it before it ends."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        atexit.register(self._report)

    @property
    def failed(self) -> bool:
        """Whether the last job has ended with an exception that `finish` will raise."""
        return self._failure is not None

    def start(self, job: Callable[[], object]) -> None:
        """Start `job`. `finish` must have been called for the last one."""

        def run() -> None:
            try:
                job()
            except Exception as error:
                self._failure = error

        # Not a daemon: at exit, threading waits for it before it runs the functions registered with atexit.
        self._thread = threading.Thread(target=run, name="dualdist-checkpoint", daemon=False)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the job, if there is one, and raise its exception."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Do not report a failure at exit. `finish` must have been called for the last job."""
        atexit.unregister(self._report)

    def _report(self) -> None:
        if self._failure is not None:
            logger.error("The last checkpoint was not saved: %s", self._failure)
