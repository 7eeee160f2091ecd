"""Finds the ranks that a collective waits for, on every backend.

A rank that has waited for `stall_warn_seconds` writes a report to the job's store. The other ranks that wait for the
same call then write theirs, and rank 0 logs which ranks are missing for which call. One thread does this, a few times
per `stall_warn_seconds`, so collectives do not slow down. Only that thread uses the store, because a read of the store
blocks when the network to it is cut.
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
"""How long to wait for the store before `missing` or `close` returns without it."""


class StallWatch:
    """Watches the collectives of one world for missing ranks."""

    def __init__(self, store: Any, rank: int, settings: Settings) -> None:
        self._store = store
        self._rank = rank
        self._settings = settings
        self._waiting: dict[str, tuple[int, Call, float]] = {}
        """Channel -> (number, call, start of the wait)."""
        self._members: dict[str, tuple[int, ...]] = {}
        """Channel -> its global ranks."""
        self._reported: set[tuple[str, int]] = set()
        """(channel, number) of the collectives that this rank has reported."""
        self._read = 0
        """How many reports this rank has read from the store."""
        self._reports: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
        """(channel, number) -> the report of each rank."""
        self._due: dict[tuple[str, int], float] = {}
        """(channel, number) -> when rank 0 logs. Until then, other ranks can see the report and write theirs."""
        self._logged: set[tuple[str, int]] = set()
        self._pause = min(5.0, max(0.02, settings.stall_warn_seconds / 8))
        self._changed = threading.Condition()
        self._requested = self._completed = 0
        """How many checks of the store were requested by `missing`, and how many of these were completed."""
        self._stopping = False
        self._thread = threading.Thread(target=self._check_repeatedly, name="dualdist-stall", daemon=True)
        if store is not None:
            self._thread.start()

    def add_channel(self, channel: str, ranks: tuple[int, ...]) -> None:
        """Add `channel`, whose members have the global ranks `ranks`."""
        self._members[channel] = ranks

    def begin(self, channel: str, number: int, call: Call) -> None:
        """Start watching `call`, the `number`-th collective of `channel`."""
        self._waiting[channel] = (number, call, time.monotonic())

    def end(self, channel: str) -> None:
        """Stop watching the collective of `channel`."""
        self._waiting.pop(channel, None)

    def missing(self, channel: str, number: int) -> list[int]:
        """Return the ranks that have not reported a wait for the `number`-th collective of `channel`."""
        if self._thread.is_alive():
            with self._changed:
                self._requested += 1
                mine = self._requested
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._completed >= mine, _ANSWER_SECONDS)
        waiting = self._reports[channel, number].keys() | {self._rank}
        return [rank for rank in self._members[channel] if rank not in waiting]

    def close(self) -> None:
        """End the watch."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_ANSWER_SECONDS)

    def _check_repeatedly(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stopping or self._requested > self._completed, self._pause
                )
                requested = self._requested
            if self._stopping:
                self._store = None
                return
            # The store fails when rank 0 has ended, and then the job ends.
            with contextlib.suppress(RuntimeError):
                self._collect()
                self._report()
                if self._rank == 0:
                    self._log()
            with self._changed:
                self._completed = requested
                self._changed.notify_all()

    def _report(self) -> None:
        for channel, (number, call, since) in list(self._waiting.items()):
            waited = time.monotonic() - since
            is_due = waited >= self._settings.stall_warn_seconds or (channel, number) in self._reports
            if not is_due or (channel, number) in self._reported:
                continue
            self._reported.add((channel, number))
            place = self._store.add("stall/count", 1)
            text = f"{call} at {call.where}"
            self._store.set(f"stall/{place}", json.dumps([channel, number, self._rank, text]))

    def _collect(self) -> None:
        count = self._store.add("stall/count", 0)
        while self._read < count and self._store.check([f"stall/{self._read + 1}"]):
            self._read += 1
            channel, number, rank, text = json.loads(self._store.get(f"stall/{self._read}"))
            self._reports[channel, number][rank] = text
            self._due.setdefault((channel, number), time.monotonic() + 2 * self._pause)

    def _log(self) -> None:
        now = time.monotonic()
        for key in [key for key, due in self._due.items() if key not in self._logged and due <= now]:
            self._logged.add(key)
            reports = self._reports[key]
            missing = [rank for rank in self._members[key[0]] if rank not in reports]
            logger.warning(
                "Stalled for %g s: ranks %s wait in %s; missing ranks: %s.",
                self._settings.stall_warn_seconds,
                sorted(reports),
                next(iter(reports.values())),
                missing,
            )
