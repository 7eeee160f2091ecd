"""Random programs of collective calls in another order on each rank, and what they must give, in plain Python."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

from hypothesis import strategies as st

CALL, CALL_AND_WAIT, WAIT, FAIL = "call", "call and wait", "wait", "fail"

KINDS = tuple("allreduce grouped_allreduce allgather broadcast alltoall reducescatter allgather_object barrier".split())
WITH_JOIN = ("allreduce", "allreduce", "allreduce", "allgather", "broadcast")
WAITING = ("allgather_object", "barrier")
"""Kinds without an asynchronous form."""


@dataclass(frozen=True)
class Op:
    """One collective. Its data on a rank follows from its number and the rank."""

    number: int
    kind: str
    name: str | None
    rows: int
    """Its tensor is (rows * number of members,)."""
    members: tuple[int, ...]
    """The ranks of its process set."""

    @property
    def identity(self) -> tuple[object, ...]:
        """What must be equal on all ranks."""
        ragged = self.kind in ("allgather", "alltoall", "allgather_object", "barrier")
        return self.kind, None if ragged else self.rows


@dataclass(frozen=True)
class Program:
    """What each rank does: (CALL, CALL_AND_WAIT, WAIT or FAIL, index of an op). joins: then it calls `join`.

    FAIL: the call has a wrong argument on this rank, and the script catches the error.
    """

    ops: tuple[Op, ...]
    steps: tuple[tuple[tuple[str, int], ...], ...]
    joins: bool

    @property
    def process_set(self) -> tuple[int, ...] | None:
        """The ranks of the process set that some of the ops use."""
        return next((op.members for op in self.ops if len(op.members) < len(self.steps)), None)

    @property
    def fails(self) -> bool:
        """Whether a call fails before it is sent."""
        return any(kind == FAIL for own in self.steps for kind, _ in own)


@st.composite
def programs(draw: st.DrawFn, size: int) -> Program:
    """Draw a program for `size` ranks: without more, with `join`, with calls on a process set, or with failures."""
    variant = draw(st.sampled_from(["", "", "join", "process set", "failure"]))
    everyone, some = tuple(range(size)), tuple(range(1, size))
    members = st.sampled_from([everyone, some]) if variant == "process set" else st.just(everyone)
    kinds = WITH_JOIN if variant == "join" else KINDS
    chosen = draw(
        st.lists(
            st.tuples(st.sampled_from(kinds), st.sampled_from([None, "x", "y", "z"]), members), min_size=1, max_size=7
        )
    )
    used = set()
    ops: list[Op] = []
    for kind, name, of in chosen:
        name = None if kind == "barrier" else name
        if name is None or (kind, name, of) not in used:
            used.add((kind, name, of))
            ops.append(Op(len(ops), kind, name, draw(st.sampled_from([1, 1, 700])), of))
    is_whole = draw(st.integers(0, 3)) > 0
    steps = [draw(_steps(ops, rank, is_whole, variant)) for rank in everyone]
    if variant == "failure":
        for rank in draw(st.lists(st.sampled_from(everyone), min_size=1, max_size=2)):
            steps[rank] = draw(_with_failure(ops, steps[rank]))
    return Program(tuple(ops), tuple(steps), variant == "join")


@st.composite
def _with_failure(draw: st.DrawFn, ops: list[Op], steps: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """Draw a call of a rank. It has a wrong argument, or an exception in the user's code comes before it."""
    calls = [number for kind, number in steps if kind != WAIT and ops[number].kind != "barrier"]
    if not calls:
        return steps
    failing, is_reported = draw(st.sampled_from(calls)), draw(st.integers(0, 3)) > 0
    return tuple(
        (FAIL, number) if number == failing else (kind, number)
        for kind, number in steps
        if number != failing or (kind != WAIT and is_reported)
    )


@st.composite
def _steps(draw: st.DrawFn, ops: list[Op], rank: int, is_whole: bool, variant: str) -> tuple[tuple[str, int], ...]:
    order = [number for number in draw(st.permutations(range(len(ops)))) if rank in ops[number].members]
    if variant == "join":
        order = order[draw(st.integers(0, len(order))) :]
    elif not is_whole and draw(st.booleans()):
        order = order[1:]
    own: list[tuple[str, int]] = []
    for number in order:
        waits = ops[number].kind in WAITING or draw(st.integers(0, 3)) == 0
        own.append((CALL_AND_WAIT if waits else CALL, number))
    for number in [number for kind, number in own if kind == CALL]:
        first = own.index((CALL, number)) + 1
        own.insert(draw(st.integers(first, len(own))), (WAIT, number))
    return tuple(own)


Key = tuple[str, str, int, tuple[int, ...]]
Runs = list[tuple[float, int]]
"""A list of numbers: each number and how often it follows itself."""
Partners = tuple[int | None, ...]
"""For each rank, the index of its op in one collective; None: it has joined, or is not a member."""


def simulated(program: Program) -> tuple[list[dict[int, Partners]], list[bool]]:
    """Return for each rank and op the partners, if the collective ends, and whether each rank finishes.

    Without `join`, a call by all ranks follows the program, so all ranks finish or none.
    """
    keys = [keys_of(program, rank) for rank in range(len(program.steps))]
    op_of = [{key: number for number, key in own.items()} for own in keys]
    position = [0] * len(keys)
    called: list[set[Key]] = [set() for _ in keys]

    def is_over(rank: int) -> bool:
        return position[rank] == len(program.steps[rank])

    def ends(key: Key) -> bool:
        return all(key in called[rank] or (program.joins and is_over(rank)) for rank in key[-1])

    while True:
        before = list(position)
        for rank, steps in enumerate(program.steps):
            while not is_over(rank):
                kind, number = steps[position[rank]]
                if kind != WAIT:
                    called[rank].add(keys[rank][number])
                if kind != CALL and not ends(keys[rank][number]):
                    break
                position[rank] += 1
        if position == before:
            break
    partners = [
        {
            number: tuple(own[key] if key in calls else None for own, calls in zip(op_of, called, strict=True))
            for number, key in own_keys.items()
            if key in own_calls and ends(key)
        }
        for own_keys, own_calls in zip(keys, called, strict=True)
    ]
    finished = [is_over(rank) for rank in range(len(keys))]
    return partners, finished if program.joins else [all(finished)] * len(keys)


def keys_of(program: Program, rank: int) -> dict[int, Key]:
    """Return the key of each op on this rank: kind, name, how many calls without a name precede it, and the members."""
    count: dict[object, int] = defaultdict(int)
    keys = {}
    for kind, number in program.steps[rank]:
        if kind != WAIT:
            op = program.ops[number]
            keys[number] = (op.kind, op.name or "", 0 if op.name else count[op.kind, op.members], op.members)
            count[op.kind, op.members] += op.name is None
    return keys


def numbers_of(op: Op, rank: int) -> list[float]:
    """Return what `rank` contributes."""
    return [float(10 * op.number + rank + 1)] * (op.rows * len(op.members))


def runs_of(numbers: list[float]) -> Runs:
    """Return (number, how often it follows itself), ... for short messages."""
    return [(number, len(list(equal))) for number, equal in itertools.groupby(numbers)]


def expected(program: Program, partners: Partners, rank: int) -> Runs | str:
    """Return the result of a collective on `rank`; "error" if the calls do not match."""
    ops = {other: program.ops[number] for other, number in enumerate(partners) if number is not None}
    own = ops[rank]
    absent = len(own.members) - len(ops)
    if len({op.identity for op in ops.values()}) > 1 or (absent and own.kind != "allreduce"):
        return "error"
    if own.kind == "barrier":
        return []
    each = {other: numbers_of(op, other) for other, op in ops.items()}
    if own.kind in ("allgather", "allgather_object"):
        return runs_of(list(itertools.chain(*each.values())))
    if own.kind == "alltoall":
        return runs_of([number for other, op in ops.items() for number in each[other][: op.rows]])
    if own.kind == "broadcast":
        return runs_of(each[len(partners) - 1])
    total = [sum(column) for column in zip(*each.values(), strict=True)]
    return runs_of(total[: own.rows] if own.kind == "reducescatter" else total)
