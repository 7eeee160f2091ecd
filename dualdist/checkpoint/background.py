"""One job at a time in a thread of its own: what an asynchronous save leaves behind."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable

__all__ = ("Background",)

logger = logging.getLogger("dualdist")


class Background:
    """Runs a job beside the caller. The interpreter waits for a job under way before it ends."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        atexit.register(self._tell)

    @property
    def failed(self) -> bool:
        """Whether the last job has ended with an exception that `finish` will raise."""
        return self._failure is not None

    def start(self, job: Callable[[], object]) -> None:
        """Start `job`. The last one must have been finished."""

        def run() -> None:
            try:
                job()
            except Exception as error:
                self._failure = error

        # Not a daemon: threading waits for it at exit, before anything registered with atexit runs.
        self._thread = threading.Thread(target=run, name="dualdist-checkpoint", daemon=False)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the job, if there is one, and raise what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Forget the end of the interpreter. The last job must have been finished."""
        atexit.unregister(self._tell)

    def _tell(self) -> None:
        if self._failure is not None:
            logger.error("The last checkpoint was not saved: %s", self._failure)
