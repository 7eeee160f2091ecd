"""Files by which the processes of a test signal each other."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path


def wait_for(files: Iterable[Path]) -> None:
    """Wait until all `files` exist. The test's timeout ends it.

    It pauses, to leave the core and Python's lock to those that are waited for.
    """
    wanted = list(files)
    while not all(file.exists() for file in wanted):
        time.sleep(0.001)
