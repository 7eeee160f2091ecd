"""What programs give in which a call fails on one rank before it is sent, in plain Python.

The calls of the other ranks from the same line raise. Until they have made them, or wait for something else, the later
calls of the rank wait. So the outcome may depend on which rank is faster: `outcome` tries several orders.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

from .programs import CALL, CALL_AND_WAIT, FAIL, WAIT, Partners, Program

ORDERS = 40
END = -1
"""The number of the call with which every program ends."""

Ended = list[dict[int, Partners | None]]
"""For each rank: op -> its partners; None if it raises."""


def outcome(program: Program) -> tuple[list[dict[int, Partners]], list[bool]] | None:
    """Return what `simulated` returns; None if it depends on which rank is faster."""
    first, *others = (_Run(program, random.Random(seed)).run() for seed in range(ORDERS))
    if any(other != first for other in others):
        return None
    ended, finished = first
    partners = [
        {number: found for number, found in own.items() if found is not None and number != END} for own in ended
    ]
    return partners, [finished] * len(ended)


@dataclass
class _Run:
    """One run, in which the ranks make their steps in a drawn order."""

    program: Program
    order: random.Random
    finished: bool = True
    position: list[int] = field(default_factory=list)
    pending: list[list[tuple[str, int]]] = field(default_factory=list)
    """For each rank (CALL, CALL_AND_WAIT or FAIL, op), in the order of the calls."""
    ended: Ended = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = [(*own, (CALL_AND_WAIT, END)) for own in self.program.steps]
        self.ranks = range(len(self.steps))
        self.position = [0 for _ in self.ranks]
        self.pending = [[] for _ in self.ranks]
        self.ended = [{} for _ in self.ranks]

    def run(self) -> tuple[Ended, bool]:
        while self.finished and any(END not in own for own in self.ended):
            movable = [rank for rank in self.ranks if self.can_step(rank)]
            if movable:
                self.step(self.order.choice(movable))
            if all(self.pending) and (not movable or self.order.random() < 0.5):
                self.exchange()
        return self.ended, self.finished

    def awaited(self, rank: int) -> int | None:
        """Return the op for which the rank waits."""
        if self.position[rank] == len(self.steps[rank]):
            return None
        kind, number = self.steps[rank][self.position[rank]]
        waits = kind == WAIT or (kind == CALL_AND_WAIT and (kind, number) in self.pending[rank])
        return number if waits and number not in self.ended[rank] else None

    def can_step(self, rank: int) -> bool:
        return self.position[rank] < len(self.steps[rank]) and self.awaited(rank) is None

    def step(self, rank: int) -> None:
        kind, number = self.steps[rank][self.position[rank]]
        if kind != WAIT and number not in self.ended[rank]:
            self.pending[rank].append((kind, number))
        self.position[rank] += kind in (CALL, FAIL) or number in self.ended[rank]

    def exchange(self) -> None:
        """End what the ranks can end, as they know of each other's pending calls."""
        pending = [list(own) for own in self.pending]
        failures = dict.fromkeys(number for kind, number in itertools.chain(*pending) if kind == FAIL)
        made = {number: [self.index(rank, number) for rank in self.ranks] for number in failures}
        complete = [number for number, indices in made.items() if None not in indices]
        for number in made:
            for rank in self.ranks:
                if number in complete:
                    pending[rank] = [entry for entry in pending[rank] if entry[1] != number]
                elif (FAIL, number) in pending[rank]:
                    del pending[rank][pending[rank].index((FAIL, number)) :]
        matched = self.matched(pending)
        if not complete and not matched:
            waits = [self.awaited(rank) is not None for rank in self.ranks]
            complete = [
                number
                for number, indices in made.items()
                if all(index is not None or waits[rank] for rank, index in enumerate(indices))
            ][:1]
            if not complete and all(waits):
                self.finished = False
        for number, partners in itertools.chain(
            ((number, None) for number in complete), ((each[0], each) for each in matched)
        ):
            for rank in self.ranks:
                self.end(rank, number if partners is None else partners[rank], partners)

    def index(self, rank: int, number: int) -> int | None:
        return next((place for place, entry in enumerate(self.pending[rank]) if entry[1] == number), None)

    def matched(self, pending: list[list[tuple[str, int]]]) -> list[tuple[int, ...]]:
        """Return the ops of the calls that all ranks have made, for each call the op of every rank."""
        keyed = []
        for own in pending:
            keys: dict[object, int] = {}
            for kind, number in own:
                op = self.program.ops[number] if number != END else None
                key = (op.kind, op.name) if op else ("allgather_object", "end")
                older = sum(1 for other in keys if isinstance(other, tuple) and other[0] == key)
                if kind != FAIL:
                    keys[key, older] = number
            keyed.append(keys)
        return [tuple(keys[key] for keys in keyed) for key in keyed[0] if all(key in keys for keys in keyed)]

    def end(self, rank: int, number: int, partners: Partners | None) -> None:
        found = self.index(rank, number)
        if found is not None:
            kind, _ = self.pending[rank].pop(found)
            self.ended[rank].update({number: partners} if kind != FAIL else {})
