"""Noticing that a rank never comes, on any backend.

A rank that has waited for `stall_warn_seconds` says so in the job's store; the others that wait for the same call
answer, and rank 0 logs which ranks are missing for which call. It is one thread that looks around a few times in that
span; no collective pays for it. That thread alone asks the store, which does not answer a host that is cut off.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import defaultdict
from typing import Any

from ..types import Settings
from .call import Call

__all__ = ("StallWatch",)

logger = logging.getLogger("dualdist")

_ANSWER_SECONDS = 2.0
"""How long the store may take to answer before we go on without it."""


class StallWatch:
    """Watches the collectives of one world for missing ranks."""

    def __init__(self, store: Any, rank: int, settings: Settings) -> None:
        self._store = store
        self._rank = rank
        self._settings = settings
        self._waiting: dict[str, tuple[int, Call, float]] = {}  # line -> (number, call, since)
        self._reported: set[tuple[str, int]] = set()
        self._members: dict[str, tuple[int, ...]] = {}
        self._read = 0
        self._reports: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
        self._due: dict[tuple[str, int], float] = {}
        """When rank 0 logs: once the other ranks have had time to see that they are asked, and to answer."""
        self._logged: set[tuple[str, int]] = set()
        self._pause = min(5.0, max(0.02, settings.stall_warn_seconds / 8))
        self._turn = threading.Condition()
        self._asked = self._answered = 0
        """How many looks were asked for, and how many of them were taken."""
        self._stopping = False
        self._thread = threading.Thread(target=self._look, name="dualdist-stall", daemon=True)
        if store is not None:
            self._thread.start()

    def add_line(self, line: str, ranks: tuple[int, ...]) -> None:
        """Make the members of `line` known."""
        self._members[line] = ranks

    def begin(self, line: str, number: int, call: Call) -> None:
        """Watch `call`, the `number`-th collective of `line`, from now on."""
        self._waiting[line] = (number, call, time.monotonic())

    def end(self, line: str) -> None:
        """Watch `line` no longer."""
        self._waiting.pop(line, None)

    def missing(self, line: str, number: int) -> list[int]:
        """Return the ranks that have not said that they wait in the `number`-th collective of `line`."""
        if self._thread.is_alive():
            with self._turn:
                self._asked += 1
                mine = self._asked
                self._turn.notify_all()
                self._turn.wait_for(lambda: self._answered >= mine, _ANSWER_SECONDS)
        came = self._reports[line, number].keys() | {self._rank}
        return [rank for rank in self._members[line] if rank not in came]

    def close(self) -> None:
        """End the watch."""
        with self._turn:
            self._stopping = True
            self._turn.notify_all()
        if self._thread.is_alive():
            self._thread.join(_ANSWER_SECONDS)

    def _look(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._stopping or self._asked > self._answered, self._pause)
                asked = self._asked
            if self._stopping:
                self._store = None
                return
            with contextlib.suppress(RuntimeError):  # the store goes with rank 0, and the job with it
                self._collect()
                self._report()
                if self._rank == 0:
                    self._log()
            with self._turn:
                self._answered = asked
                self._turn.notify_all()

    def _report(self) -> None:
        for line, (number, call, since) in list(self._waiting.items()):
            waited = time.monotonic() - since
            asked = waited >= self._settings.stall_warn_seconds or (line, number) in self._reports
            if not asked or (line, number) in self._reported:
                continue
            self._reported.add((line, number))
            place = self._store.add("stall/count", 1)
            text = f"{call} at {call.where}"
            self._store.set(f"stall/{place}", json.dumps([line, number, self._rank, text]))

    def _collect(self) -> None:
        count = self._store.add("stall/count", 0)
        while self._read < count and self._store.check([f"stall/{self._read + 1}"]):
            self._read += 1
            line, number, rank, text = json.loads(self._store.get(f"stall/{self._read}"))
            self._reports[line, number][rank] = text
            self._due.setdefault((line, number), time.monotonic() + 2 * self._pause)

    def _log(self) -> None:
        now = time.monotonic()
        for key in [key for key, due in self._due.items() if key not in self._logged and due <= now]:
            self._logged.add(key)
            came = self._reports[key]
            missing = [rank for rank in self._members[key[0]] if rank not in came]
            logger.warning(
                "Stalled for %g s: %s is waited for by ranks %s; missing ranks: %s.",
                self._settings.stall_warn_seconds,
                next(iter(came.values())),
                sorted(came),
                missing,
            )
