"""Watching processes that are not our children until they have ended."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable

SECONDS = 60.0


class Watched:
    """The processes `pids`, held by files, so that none is mistaken for another that gets its number later."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._files = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                self._files[pid] = os.pidfd_open(pid)

    def left(self, seconds: float = SECONDS) -> list[int]:
        """Return who has not ended within `seconds`, and end them; at once when all have."""
        left = []
        for pid, file in self._files.items():
            ended, _, _ = select.select([file], [], [], seconds)
            if not ended:
                left.append(pid)
                os.kill(pid, 9)
            os.close(file)
        return left
