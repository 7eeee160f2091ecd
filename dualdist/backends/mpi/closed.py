"""Communicators of destroyed process groups, until all members know that none of them uses one any more.

MPI_Comm_free does not wait for the other members. When one of them has given up a collective, its messages may arrive
later. Open MPI 4.1 keeps a message for an unknown communicator until the next one with the same number exists, and then
crashes or delivers it there (mca_pml_ob1_add_comm in ompi/mca/pml/ob1/pml_ob1.c). So a communicator is freed only
when its members meet again, to make another one, and all of them have destroyed its group without such a collective.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ("Closed", "Label", "closed")

_TOKEN_BYTES = 8


class Label(NamedTuple):
    """What the members of a communicator call it."""

    token: str
    ranks: Sequence[int]
    """Their ranks in MPI's world."""


class Closed:
    """The communicators of this process that it does not use any more."""

    def __init__(self) -> None:
        self._communicators: dict[Label, Any] = {}

    def add(self, label: Label, communicator: Any) -> None:
        """Free `communicator` when that is safe. Local. No request of this process uses it."""
        self._communicators[label] = communicator

    def message(self, rank: int) -> str:
        """Return what this process tells the other members of a new communicator. rank: in MPI's world."""
        return json.dumps(
            [rank, secrets.token_hex(_TOKEN_BYTES), [label.token for label in self._communicators]]
        )

    def meet(self, messages: Sequence[str]) -> Label:
        """Return the label of the new communicator, and free those that all their members have closed. Collective.

        messages: of the members.
        """
        ranks, tokens, known = zip(*map(json.loads, messages), strict=True)
        closed_by = dict(zip(ranks, map(frozenset, known), strict=True))
        for label in sorted(
            self._communicators
        ):  # by token: MPI_Comm_free is collective, so all use one order
            if all(label.token in closed_by.get(rank, ()) for rank in label.ranks):
                self._communicators.pop(label).Free()
        return Label(tokens[0], tuple(ranks))


closed = Closed()
"""The single instance of this process."""
