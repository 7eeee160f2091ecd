"""Random training scripts that change gradients, parameters and optimizers at every point of a step.

dualdist must do what plain torch does between two combinations, and combine by the rules of mutation_oracle.py. A
program follows from its seed, the style and the number of ranks. A failure names the seed and prints a program from
which no statement can be left out.

    pytest tests/parity/test_mutations.py --programs 1000 --timeout 3000
    HOROVOD_CACHE_CAPACITY=65536 pytest ... --worlds horovod-gloo-2    # else Horovod prints that it forgets names
    pytest tests/parity/test_mutations.py --program-seed 17 --worlds torch-gloo-2
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..helpers.world import World, WorldFailure
from .mutation_oracle import difference, expected
from .mutations import Program, draw_program

STYLES = ("optimizer", "module")
AT_ONCE = 10
"""How many programs run in one call to the world."""
REPORTS = 5
"""How many kinds of failures are reported in full."""
REPORT_SECONDS = 20.0
"""How long statements are left out of a program that fails."""


@dataclass(frozen=True)
class Failure:
    """What is wrong in a program on one rank."""

    number: int
    """Of the statement."""
    kind: str
    text: str


@dataclass(frozen=True)
class Outcome:
    """What became of a program on one rank."""

    failure: Failure | None
    program: str
    length: int
    """How many statements were drawn."""


def perform(seeds: Sequence[int], style: str, folder: str, left_out: frozenset[int] = frozenset()) -> list[Outcome]:
    """Run programs on this rank. left_out: the numbers of statements that are not run."""
    import dualdist as hvd

    return [perform_one(seed, style, Path(folder) / str(hvd.rank()), left_out) for seed in seeds]


def perform_one(seed: int, style: str, progress: Path, left_out: frozenset[int]) -> Outcome:
    import dualdist as hvd

    from .mutation_wrappers import Distributed

    progress.write_text(f"seed {seed}, preparing")
    drawn = draw_program(seed, style, hvd.size())
    kept = [one for place, one in enumerate(drawn.statements) if place not in left_out]
    wanted = expected(Program(drawn.setup, tuple(kept)), hvd.rank())
    program = wanted.program
    failure: Failure | None = None
    number, kind = -1, "wrap"
    try:
        progress.write_text(f"seed {seed}, wrapping")
        replica = Distributed(program.setup, hvd.rank())
        for number, statement in enumerate(program.statements):
            kind = statement.kind
            progress.write_text(f"seed {seed}, statement {number}: {statement}")
            replica.mark(statement)
            if statement.runs_on(hvd.rank()):
                replica.act(statement)
            if failure is None:
                different = difference(program.setup, replica.snapshot(), wanted.snapshots[number])
                if different:
                    failure = Failure(number, f"{kind}: {different[0]}", different[1])
        different = difference(program.setup, replica.state(), wanted.state)
        if failure is None and different:
            failure = Failure(number, f"end: {different[0]}", different[1])
    except Exception as error:
        if failure is None:
            text = "".join(traceback.format_exception(error))
            failure = Failure(number, f"{kind}: {type(error).__name__}", text)
    with contextlib.suppress(NameError):
        del replica, statement
    if failure is not None or seed % AT_ONCE == 0:
        gc.collect()
    try:  # a rank that is still in the program gets an error
        hvd.allgather_object(seed, name="end of a program")
    except hvd.HorovodInternalError:
        hvd.allgather_object(seed, name="end of a program")
    return Outcome(failure, str(program), len(drawn.statements))


class Runner:
    """Runs programs of one style in a world, and collects those that fail."""

    def __init__(self, world: World, style: str, folder: Path) -> None:
        self.world, self.style, self.folder = world, style, folder
        self.failed: dict[str, list[int]] = defaultdict(list)
        """The seeds of failed programs by the kind of failure."""
        self.reports: list[str] = []
        """A full report of the first one of each kind, of a few kinds."""

    def run(self, seeds: Sequence[int], left_out: frozenset[int] = frozenset()) -> list[tuple[Outcome, ...]]:
        """Return the outcomes of each program on all ranks. Raises WorldFailure with the place of each rank."""
        try:
            outcomes = self.world.run(perform, seeds, self.style, str(self.folder), left_out)
        except WorldFailure as error:
            raise WorldFailure("\n".join([*self.places(), str(error)])) from None
        return list(zip(*outcomes, strict=True))

    def run_all(self, seeds: Sequence[int]) -> None:
        for start in range(0, len(seeds), AT_ONCE):
            self.run_some(seeds[start : start + AT_ONCE])

    def run_some(self, seeds: Sequence[int]) -> None:
        try:
            outcomes = self.run(seeds)
        except WorldFailure as error:
            # The results of this call are lost.
            place = min(seeds.index(int(text.split()[1].rstrip(","))) for text in self.places())
            if self.is_new("a rank has ended or does not answer", seeds[place]):
                self.reports.append(f"{self.style} style, {self.world}:\n{error}")
            for part in filter(None, (seeds[:place], seeds[place + 1 :])):
                self.run_some(part)
            return
        for seed, found in zip(seeds, outcomes, strict=True):
            failure = failure_of(found)
            if failure is not None and self.is_new(failure[1].kind, seed):
                self.reports.append(self.report(seed, found))

    def is_new(self, kind: str, seed: int) -> bool:
        """Record a failure; return whether it needs a report."""
        self.failed[kind].append(seed)
        return len(self.failed[kind]) == 1 and len(self.reports) < REPORTS

    def places(self) -> list[str]:
        """Return where each rank is."""
        return [path.read_text() for path in sorted(self.folder.iterdir())]

    def report(self, seed: int, outcomes: Sequence[Outcome]) -> str:
        """Leave out statements while the program fails in the same way, and describe what is left."""
        found = failure_of(outcomes)
        assert found is not None
        kind, left_out = found[1].kind, frozenset[int]()
        deadline = time.monotonic() + REPORT_SECONDS
        for place in reversed(range(outcomes[0].length)):
            if time.monotonic() > deadline:
                break
            try:
                tried = self.run([seed], left_out | {place})[0]
            except WorldFailure:
                continue
            again = failure_of(tried)
            if again is not None and again[1].kind == kind:
                outcomes, found, left_out = tried, again, left_out | {place}
        rank, failure = found
        return (
            f"{self.style} style, {self.world}, seed {seed}:\n{outcomes[0].program}\n"
            f"rank {rank}, after statement {failure.number}: {failure.kind}\n{failure.text}"
        )


def failure_of(outcomes: Sequence[Outcome]) -> tuple[int, Failure] | None:
    """Return the earliest failure, and its rank. Of errors, the last one is that of a rank that waited."""
    found = [(rank, outcome.failure) for rank, outcome in enumerate(outcomes) if outcome.failure is not None]
    waited = ("HorovodInternalError", "CollectiveMismatchError")
    return min(found, key=lambda one: (one[1].number, one[1].kind.endswith(waited)), default=None)


@pytest.mark.only_ci(where=lambda world: "horovod" in world)
@pytest.mark.only_all(where=lambda world: world == "local-1")
@pytest.mark.only_all(where=lambda world, style: "horovod" in world and style == "module")
@pytest.mark.parametrize("style", STYLES)
def test_scripts_that_change_gradients_train_as_in_plain_torch(
    world: World, style: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    seed = request.config.getoption("--program-seed")
    runner = Runner(world, style, tmp_path)
    runner.run_all(range(request.config.getoption("--programs")) if seed is None else [seed])
    if runner.failed:
        counts = [f"{len(seeds)} programs failed, {kind}: seeds {seeds}" for kind, seeds in runner.failed.items()]
        pytest.fail("\n".join([*runner.reports, *counts]), pytrace=False)
