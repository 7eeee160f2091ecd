"""A call of this rank that waits for the other members."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from .call import Call
from .result import Result
from .script_threads import waiting_for
from .verdict import Entry

__all__ = ("Request",)

T = TypeVar("T")


class Request(Result[T]):
    """A pending call and its result."""

    def __init__(self, entry: Entry, compute: Callable[[Any], T], on_wait: Callable[[], None]) -> None:
        """Make the request.

        Args:
            entry: what this rank contributes to the agreements.
            compute: returns the result, from the verdict of the members.
            on_wait: called when a thread begins to wait for the result.
        """
        super().__init__(compute)
        self.entry = entry
        self._issued = time.time_ns()
        self._on_wait = on_wait

    @functools.cached_property
    def listed(self) -> Entry:
        """The entry as other members see it in a list of pending calls: without its data."""
        return self.entry._replace(call=replace(self.entry.call, payload=b""), issued=self._issued)

    @property
    def call(self) -> Call:
        """The call of the entry."""
        return self.entry.call

    def get(self) -> T:
        if self.done():
            return super().get()
        with waiting_for(self):
            self._on_wait()
            return super().get()
