"""What each member of a process set is doing while a call waits for some of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from .verdict import shown_ranks

__all__ = (
    "ABSENT",
    "BEHIND",
    "ENDED",
    "INTERRUPTED",
    "LEFT",
    "SILENT",
    "SUSPENDED",
    "WAITING",
    "State",
    "Survey",
)

WAITING, LEFT, ABSENT, SILENT, ENDED = "waiting", "left", "absent", "silent", "ended"
"""A rank waits in the call, has left it, has not made it yet, does not answer, or its process has ended."""
BEHIND, INTERRUPTED, SUSPENDED = "behind", "interrupted", "suspended"
"""A rank waits in another call of the same process set, an exception has ended a call on this rank alone, or its
process did not run for so long that the others gave up."""


@dataclass(frozen=True)
class State:
    """What one rank is doing."""

    kind: str
    call: str = ""
    """The call in which the rank waits, if it waits; for INTERRUPTED, the exception."""
    seconds: float = 0.0
    """For SUSPENDED: how long its process did not run."""

    def __str__(self) -> str:
        if self.kind == SILENT:
            return "no answer: stopped, or cut off from the network"
        if self.kind == ENDED:
            return "process ended, or called shutdown()"
        if self.kind == INTERRUPTED:
            return f"interrupted by an exception: {self.call}"
        where = f"waiting in {self.call}" if self.call else "in no collective"
        if self.kind == SUSPENDED:
            return f"did not run for {self.seconds:.0f} s: stopped, or a thread kept Python's global lock; now {where}"
        return f"done with this call, {where}" if self.kind == LEFT else where


@dataclass(frozen=True)
class Survey:
    """What each member is doing, by its global rank."""

    states: Mapping[int, State]
    has_failed: bool = False
    """Whether the backend has failed, so that the call did not wait for ranks that are late."""

    def ranks(self, *kinds: str) -> list[int]:
        """Return the ranks whose state is of one of `kinds`."""
        return [rank for rank, state in self.states.items() if state.kind in kinds]

    @property
    def missing(self) -> list[int]:
        """The ranks that have not made the call, or that died or stopped in it.

        A rank that waits in another call is not missing if one has died or stopped: it waits for that one, too. Ranks
        may have ended because one has stopped, and they may come later if the backend has failed because one has ended.
        """
        causes = (SILENT, INTERRUPTED, SUSPENDED) if self.ranks(SUSPENDED) else (SILENT, INTERRUPTED, ENDED)
        gone = self.ranks(*causes)
        if gone and self.has_failed:
            return sorted(gone)
        absent = self.ranks(ABSENT) if gone else self.ranks(ABSENT, BEHIND)
        return sorted([*absent, *gone])

    def __str__(self) -> str:
        """Return what errors show: the missing ranks, then a row for each thing that ranks are doing."""
        groups: dict[State, list[int]] = defaultdict(list)
        present = [rank for rank in self.ranks(BEHIND, WAITING, LEFT) if rank not in self.missing]
        for rank in [*self.missing, *present]:
            groups[self.states[rank]].append(rank)
        rows = [f"  {shown_ranks(members)}: {state}" for state, members in groups.items()]
        return "\n".join([f"missing ranks: {self.missing}.", *rows])
