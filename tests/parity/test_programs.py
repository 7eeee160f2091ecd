"""Programs that call collectives in another order on each rank, drawn at random: dualdist finishes what Horovod does.

A program is for each rank a list of calls, synchronous or asynchronous, with waits for handles between them. Horovod
matches calls by name, in any order. `simulated` does the same with plain Python and says which calls end, with what,
and whether the program can finish; a sample of the programs runs on real Horovod to check it. dualdist must give the
same numbers on every backend. If a program cannot finish, every rank must raise at once.

    pytest tests/parity/test_programs.py --programs 1000 --timeout 600
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ..helpers.world import World
from .test_differential import WORLDS

CALL, CALL_AND_WAIT, WAIT = "call", "call and wait", "wait"
AT_ONCE_SECONDS = 20.0
"""Time for a program that cannot finish, on a busy machine; an undetected one would wait for ten minutes."""
HOROVOD_SECONDS = 20.0
"""The longest that real Horovod may take for the collectives of a program."""
SAMPLE = 5
"""One in so many programs runs on real Horovod as well."""

KINDS = (
    "allreduce",
    "grouped_allreduce",
    "allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
    "allgather_object",
)


@dataclass(frozen=True)
class Op:
    """One collective. Its data on a rank follows from its number and the rank."""

    number: int
    kind: str
    name: str | None
    rows: int
    """Its tensor is (rows * number of ranks,)."""

    @property
    def identity(self) -> tuple[object, ...]:
        """What must be equal on all ranks."""
        ragged = self.kind in ("allgather", "alltoall", "allgather_object")
        return self.kind, None if ragged else self.rows


@dataclass(frozen=True)
class Program:
    """What each rank does: (CALL, CALL_AND_WAIT or WAIT, index of an op)."""

    ops: tuple[Op, ...]
    steps: tuple[tuple[tuple[str, int], ...], ...]


@st.composite
def programs(draw: st.DrawFn, size: int) -> Program:
    chosen = draw(
        st.lists(
            st.tuples(st.sampled_from(KINDS), st.sampled_from([None, "x", "y", "z"])), min_size=1, max_size=7
        )
    )
    used = set()
    ops: list[Op] = []
    for kind, name in chosen:
        if name is None or (kind, name) not in used:
            used.add((kind, name))
            ops.append(Op(len(ops), kind, name, draw(st.sampled_from([1, 1, 700]))))
    steps = []
    is_whole = draw(st.integers(0, 3)) > 0
    for _ in range(size):
        order = draw(st.permutations(range(len(ops))))
        if not is_whole and draw(st.booleans()):
            order = order[1:]
        own: list[tuple[str, int]] = []
        for number in order:
            waits = ops[number].kind == "allgather_object" or draw(st.integers(0, 3)) == 0
            own.append((CALL_AND_WAIT if waits else CALL, number))
        for number in [number for kind, number in own if kind == CALL]:
            first = own.index((CALL, number)) + 1
            own.insert(draw(st.integers(first, len(own))), (WAIT, number))
        steps.append(tuple(own))
    return Program(tuple(ops), tuple(steps))


Partners = tuple[int, ...]
"""For each rank, the index of its op in one collective."""


def simulated(program: Program) -> tuple[list[dict[int, Partners]], bool]:
    """Return for each rank and op the partners, if the collective ends, and whether the program finishes."""
    keys = [keys_of(program, rank) for rank in range(len(program.steps))]
    op_of = [{key: number for number, key in own.items()} for own in keys]
    position = [0] * len(keys)
    called: list[set[object]] = [set() for _ in keys]
    while True:
        before = list(position)
        for rank, steps in enumerate(program.steps):
            while position[rank] < len(steps):
                kind, number = steps[position[rank]]
                if kind != WAIT:
                    called[rank].add(keys[rank][number])
                if kind != CALL and not all(keys[rank][number] in others for others in called):
                    break
                position[rank] += 1
        if position == before:
            break
    ended = set.intersection(*called)
    partners = [
        {number: tuple(own[key] for own in op_of) for number, key in own_keys.items() if key in ended}
        for own_keys in keys
    ]
    return partners, all(place == len(steps) for place, steps in zip(position, program.steps, strict=True))


def keys_of(program: Program, rank: int) -> dict[int, tuple[str, str, int]]:
    """Return the key of each op on this rank: kind and name, or kind and how many calls without a name precede it."""
    count: dict[str, int] = defaultdict(int)
    keys = {}
    for kind, number in program.steps[rank]:
        if kind != WAIT:
            op = program.ops[number]
            keys[number] = (op.kind, op.name or "", 0 if op.name else count[op.kind])
            count[op.kind] += op.name is None
    return keys


def numbers_of(op: Op, rank: int, size: int) -> list[float]:
    return [float(10 * op.number + rank + 1)] * (op.rows * size)


def expected(program: Program, partners: Partners, rank: int) -> Any:
    """Return the result of a collective on `rank`, a list of numbers; "error" if the calls do not match."""
    size, ops = len(partners), [program.ops[number] for number in partners]
    if len({op.identity for op in ops}) > 1:
        return "error"
    each = [numbers_of(op, other, size) for other, op in enumerate(ops)]
    rows, kind = ops[rank].rows, ops[rank].kind
    if kind in ("allgather", "allgather_object"):
        return list(itertools.chain(*each))
    if kind == "alltoall":
        return [number for other, op in zip(each, ops, strict=True) for number in other[: op.rows]]
    if kind == "broadcast":
        return each[size - 1]
    total = [sum(column) for column in zip(*each, strict=True)]
    return total[:rows] if kind == "reducescatter" else total


def start(hvd: Any, op: Op, name: str | None, *, waits: bool) -> Any:
    """Start `op` and return its handle; with `waits`, call it and return its result."""
    suffix, size = "" if waits else "_async", hvd.size()
    tensor = torch.tensor(numbers_of(op, hvd.rank(), size))
    if op.kind == "allgather_object":
        return torch.tensor(list(itertools.chain(*hvd.allgather_object(tensor.tolist(), name=name))))
    function: Callable[..., Any] = getattr(hvd, op.kind + suffix)
    if op.kind == "grouped_allreduce":
        return function([tensor], name=name, op=hvd.Sum)
    if op.kind in ("allreduce", "reducescatter"):
        return function(tensor, name=name, op=hvd.Sum)
    return function(tensor, *([size - 1] if op.kind == "broadcast" else []), name=name)


def flat(result: Any) -> list[float]:
    while isinstance(result, list | tuple):
        result = result[0]
    numbers: list[float] = result.flatten().tolist()
    return numbers


def perform(program: Program) -> tuple[dict[int, Any], bool, float]:
    """Run the program on dualdist; return the result of each op, whether it finished, and the seconds it took."""
    import dualdist as hvd

    results: dict[int, Any] = {}
    handles: dict[int, int] = {}
    finished, began = True, time.monotonic()

    def end(number: int, wait: Callable[[], Any]) -> None:
        nonlocal finished
        try:
            results[number] = flat(wait())
        except hvd.CollectiveMismatchError as error:
            results[number] = "error"
            finished &= "Each rank waits for a call that another rank has not made" not in str(error)

    try:
        for kind, number in program.steps[hvd.rank()]:
            op = program.ops[number]
            if kind == CALL:
                handles[number] = start(hvd, op, op.name, waits=False)
            elif kind == WAIT:
                end(number, lambda number=number: hvd.synchronize(handles.pop(number)))  # type: ignore[misc]
            else:
                end(number, lambda op=op: start(hvd, op, op.name, waits=True))  # type: ignore[misc]
            if not finished:
                break
        else:
            hvd.barrier()
    except hvd.CollectiveMismatchError:
        finished = False
    seconds = time.monotonic() - began
    for number, handle in handles.items():
        end(number, lambda handle=handle: hvd.synchronize(handle))  # type: ignore[misc]
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
    return results, finished, seconds


_programs = itertools.count()


def perform_on_horovod(program: Program, expected_ends: Sequence[int]) -> tuple[dict[int, Any], bool]:
    """Run the program on real Horovod with asynchronous calls, so that one that cannot finish can be left.

    expected_ends: how many collectives should end on each rank. Wait for these, and then a little longer.
    """
    import horovod.torch

    import dualdist

    if not horovod.torch.is_initialized():
        horovod.torch.init()
    prefix, rank = f"program{next(_programs)}", dualdist.rank()
    names = {number: f"{prefix}.{key}" for number, key in keys_of(program, rank).items()}
    steps, handles, results = program.steps[rank], dict[int, int](), dict[int, Any]()
    position, unchanged, deadline = 0, 0, time.monotonic() + HOROVOD_SECONDS
    seen: list[tuple[int, int, bool]] = []
    while unchanged < 3:
        pause = time.monotonic() + 0.03
        while time.monotonic() < pause:
            if position < len(steps):
                kind, number = steps[position]
                if kind != WAIT and number not in handles:
                    handles[number] = start_on_horovod(program.ops[number], names[number])
                position += kind == CALL or number in results
            for number, handle in handles.items():
                if number not in results and horovod.torch.poll(handle):
                    results[number] = result_on_horovod(handle)
        now = dualdist.allgather_object((position, len(results), time.monotonic() > deadline))
        as_expected = all(ended >= wanted for (_, ended, _), wanted in zip(now, expected_ends, strict=True))
        is_late = any(late for *_, late in now)
        unchanged = unchanged + 1 if now == seen and (as_expected or is_late) else 0
        seen = now
    return results, all(place == len(own) for (place, *_), own in zip(seen, program.steps, strict=True))


def result_on_horovod(handle: int) -> Any:
    import horovod.torch

    try:
        return flat(horovod.torch.synchronize(handle))
    except horovod.torch.HorovodInternalError:
        return "error"


def start_on_horovod(op: Op, name: str) -> int:
    import horovod.torch

    if op.kind != "allgather_object":
        handle: int = start(horovod.torch, op, name, waits=False)
        return handle
    tensor = torch.tensor(numbers_of(op, horovod.torch.rank(), horovod.torch.size()))
    handle = horovod.torch.allgather_async(tensor, name=name)
    return handle


@pytest.fixture(scope="module", params=WORLDS)
def both(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(*WORLDS[request.param])
    yield world
    world.close()


def check(program: Program, results: Sequence[Mapping[int, Any]], *, raises: bool) -> None:
    """Compare what each rank got with the simulation. raises: whether the ops that do not end raise."""
    partners, _ = simulated(program)
    for rank, own in enumerate(results):
        wanted = {number: expected(program, found, rank) for number, found in partners[rank].items()}
        if raises:
            wanted = dict.fromkeys(own, "error") | wanted
        assert own == wanted, f"rank {rank} got {own}, not {wanted}, in {program}"


def test_programs_in_any_order_do_what_horovod_does(both: World, request: pytest.FixtureRequest) -> None:
    count = itertools.count()

    @settings(
        max_examples=request.config.getoption("--programs"),
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a failed world starts again, so shrinking would take minutes
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs(both.size))
    def run(program: Program) -> None:
        partners, finishes = simulated(program)
        outcomes = both.run(perform, program)
        check(program, [results for results, _, _ in outcomes], raises=True)
        assert [finished for _, finished, _ in outcomes] == [finishes] * both.size, program
        assert max(seconds for _, _, seconds in outcomes) < AT_ONCE_SECONDS, program
        if next(count) % SAMPLE == 0:
            theirs = both.run(perform_on_horovod, program, [len(own) for own in partners])
            check(program, [results for results, _ in theirs], raises=False)
            assert [finished for _, finished in theirs] == [finishes] * both.size, program

    run()
