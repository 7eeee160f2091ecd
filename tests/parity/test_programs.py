"""Programs that call collectives in another order on each rank, drawn at random: dualdist finishes what Horovod does.

A program is for each rank a list of calls, synchronous or asynchronous, with waits for handles between them; in some,
ranks join after another number of calls each, a part of the calls is on a process set, or a call fails on one rank
before it is sent. Horovod matches calls by
name, in any order. `simulated` does the same with plain Python: which calls end, with what, and whether the program can
finish; a sample of the programs runs on real Horovod to check it. dualdist must give the same numbers on every backend.
If a program cannot finish, every rank must raise at once. (With a process set, only programs that finish are run:
ranks that wait for each other in different sets are found by the stall check.)

    pytest tests/parity/test_programs.py --programs 1000 --timeout 600
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings

from ..helpers.forks import BIN
from ..helpers.requirements import need_modules
from ..helpers.world import MPIRUN, World, WorldKind
from .calls import Case, cases, compare
from .failing_programs import outcome
from .programs import (
    CALL,
    FAIL,
    WAIT,
    Op,
    Partners,
    Program,
    Runs,
    expected,
    keys_of,
    numbers_of,
    programs,
    runs_of,
    simulated,
)

pytestmark = pytest.mark.only_ci(where=lambda both: both in ("torch-gloo-2", "horovod-mpi-2"))

HOROVOD_SECONDS = 20.0
"""The longest that real Horovod may take for the collectives of a program."""
SAMPLE = 5
"""One in so many programs runs on real Horovod as well."""
RANDOM = settings(
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # a failed world starts again, so shrinking would take minutes
    suppress_health_check=list(HealthCheck),
)


def start(hvd: Any, op: Op, *, waits: bool, name: str | None = None, **options: Any) -> Any:
    """Start `op` and return its handle; with `waits`, call it and return its result."""
    name, tensor = name or op.name, torch.tensor(numbers_of(op, hvd.rank()))
    call = line_of(op.number)
    if op.kind == "barrier":
        call(hvd.barrier, **options)
        return torch.empty(0)
    if op.kind == "allgather_object":
        gathered = call(hvd.allgather_object, tensor.tolist(), name=name, **options)
        return torch.tensor(list(itertools.chain(*gathered)))
    function = functools.partial(call, getattr(hvd, op.kind + ("" if waits else "_async")))
    if op.kind == "grouped_allreduce":
        return function([tensor], name=name, op=hvd.Sum, **options)
    if op.kind in ("allreduce", "reducescatter"):
        return function(tensor, name=name, op=hvd.Sum, **options)
    return function(tensor, *([hvd.size() - 1] if op.kind == "broadcast" else []), name=name, **options)


@functools.cache
def line_of(number: int) -> Callable[..., Any]:
    """Return a function that calls another one from a line of its own. A failed call is matched by its line."""
    names: dict[str, Callable[..., Any]] = {}
    code = "\n" * number + "def call(function, *arguments, **options): return function(*arguments, **options)"
    exec(compile(code, "program.py", "exec"), names)
    return names["call"]


def fail(hvd: Any, op: Op) -> str:
    """Call `op` with a wrong argument, and return the name of the error."""
    wrong: Any = {"name": 17}
    try:
        start(hvd, op, waits=op.kind == "allgather_object", **wrong)
    except TypeError as error:
        return type(error).__name__
    return "no error"


def flat(result: Any) -> Runs:
    while isinstance(result, list | tuple):
        result = result[0]
    return runs_of(result.flatten().tolist())


@functools.cache
def process_set_of(members: tuple[int, ...]) -> Any:
    import dualdist as hvd

    return hvd.add_process_set(members)


def perform(program: Program) -> tuple[dict[int, Any], bool]:
    """Run the program on dualdist; return the result of each op, and whether it finished."""
    import dualdist as hvd

    results: dict[int, Any] = {}
    handles: dict[int, int] = {}
    finished = True
    special = process_set_of(program.process_set) if program.process_set else None

    def run(op: Op, *, waits: bool) -> Any:
        options = {"process_set": special} if op.members == program.process_set else {}
        return start(hvd, op, waits=waits, **options)

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
            if kind == FAIL:
                results[number] = fail(hvd, op)
            elif kind == CALL:
                handles[number] = run(op, waits=False)
            elif kind == WAIT:
                end(number, lambda number=number: hvd.synchronize(handles.pop(number)))  # type: ignore[misc]
            else:
                end(number, lambda op=op: run(op, waits=True))  # type: ignore[misc]
            if not finished:
                break
        else:
            if not program.joins:
                hvd.allgather_object(None, name="end")
    except hvd.CollectiveMismatchError:
        finished = False
    for number, handle in handles.items():
        end(number, lambda handle=handle: hvd.synchronize(handle))  # type: ignore[misc]
    if program.joins:
        hvd.join()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
    return results, finished


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
        pause, is_first = time.monotonic() + 0.03, True
        while is_first or time.monotonic() < pause:
            is_first = False
            if position < len(steps):
                kind, number = steps[position]
                if kind != WAIT and number not in handles:
                    handles[number] = start_on_horovod(program.ops[number], names[number])
                position += kind == CALL or number in results
            for number, handle in handles.items():
                if number not in results and horovod.torch.poll(handle):
                    results[number] = result_on_horovod(handle)
            time.sleep(0.001)  # leaves the core to Horovod's thread
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

    handle: int
    if op.kind == "allgather_object":
        tensor = torch.tensor(numbers_of(op, horovod.torch.rank()))
        handle = horovod.torch.allgather_async(tensor, name=name)
    else:
        handle = start(horovod.torch, op, waits=False, name=name)
    return handle


def runs_on_horovod(program: Program) -> bool:
    """Return whether real Horovod can run the program and the next one after it.

    A barrier and `join` cannot be left when the program does not finish, and an error while ranks have joined ends
    Horovod 0.28.1 with a segmentation fault. Process sets are not added,
    and a call that fails on one rank stalls the others.
    """
    is_plain = program.process_set is None and not program.joins and not program.fails
    return is_plain and all(op.kind != "barrier" for op in program.ops)


HOROVODRUN = (f"{BIN}/horovodrun", "--gloo", "-np", "{size}")


def _torch(transport: str) -> MappingProxyType[str, str]:
    return MappingProxyType({"DUALDIST_BACKEND": "torch", "DUALDIST_TRANSPORT": transport})


WORLD_KINDS = (
    WorldKind("torch-gloo", HOROVODRUN, _torch("gloo")),
    WorldKind("torch-mpi", MPIRUN, _torch("mpi")),
    WorldKind("horovod-gloo", HOROVODRUN, MappingProxyType({"DUALDIST_BACKEND": "horovod"})),
    WorldKind("horovod-mpi", MPIRUN, MappingProxyType({"DUALDIST_BACKEND": "horovod"})),
)
"""Real Horovod runs in all of these; the name says what dualdist runs on."""

WORLDS = {f"{kind.name}-{size}": (kind, size) for kind in WORLD_KINDS for size in (2, 3)}


@pytest.fixture(scope="module", params=WORLDS)
def both(request: pytest.FixtureRequest) -> Iterator[World]:
    need_modules("horovod.torch", "mpi4py")
    world = World(*WORLDS[request.param])
    yield world
    world.close()


def check(
    program: Program, partners: Sequence[Mapping[int, Partners]], results: Sequence[Mapping[int, Any]], *, raises: bool
) -> None:
    """Compare what each rank got with the simulation. raises: whether the ops without partners raise."""
    for rank, own in enumerate(results):
        wanted: dict[int, Runs | str] = {
            number: expected(program, found, rank) for number, found in partners[rank].items()
        }
        wanted |= {number: "TypeError" for kind, number in program.steps[rank] if kind == FAIL and number in own}
        if raises:
            wanted = {**dict.fromkeys(own, "error"), **wanted}
        assert own == wanted, f"rank {rank} got {own}, not {wanted}, in {program}"


@pytest.mark.only_ci(where=lambda both: both == "torch-mpi-2")
def test_programs_in_any_order_do_what_horovod_does(both: World, request: pytest.FixtureRequest) -> None:
    count = itertools.count()

    @settings(RANDOM, max_examples=request.config.getoption("--programs"))
    @given(program=programs(both.size))
    def run(program: Program) -> None:
        found = outcome(program) if program.fails else simulated(program)
        assume(found is not None)
        assert found is not None
        partners, finished = found
        assume(all(finished) or program.process_set is None)
        outcomes = both.run(perform, program)
        check(program, partners, [results for results, _ in outcomes], raises=True)
        assert [own for _, own in outcomes] == finished, program
        if next(count) % SAMPLE == 0 and runs_on_horovod(program):
            theirs = both.run(perform_on_horovod, program, [len(own) for own in partners])
            check(program, partners, [results for results, _ in theirs], raises=False)
            assert [own for _, own in theirs] == finished, program

    run()


@settings(RANDOM, max_examples=60)
@given(case=cases())
def test_every_call_does_what_real_horovod_does(both: World, case: Case) -> None:
    both.run(compare, case)
