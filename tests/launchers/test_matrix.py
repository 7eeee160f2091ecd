"""Every launcher with every engine: each pair works, or refuses within 20 seconds and says what to do instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType

import pytest

from ..helpers.slurm_cluster import Slurm
from ..helpers.task_launch import PROGRAM, WORKER, Start, Told, Trial, try_tasks
from ..helpers.task_worker import Task
from ..helpers.world import BIN, MPIRUN

pytestmark = pytest.mark.timeout(300)  # the launches run two at a time, before the first test

_TCP = MappingProxyType({"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "lo"})
"""As tests.helpers.world.MPIRUN says on its command line."""
NOTHING: Mapping[str, str] = MappingProxyType({})
_MPI_ARGUMENTS = "--mpi-args=--allow-run-as-root --oversubscribe --bind-to none"


def _mpirun(size: int) -> tuple[str, ...]:
    return (*(part.format(size=size) for part in MPIRUN), *PROGRAM)


def _torchrun(size: int) -> tuple[str, ...]:
    return (f"{BIN}/torchrun", "--standalone", "--nproc-per-node", f"{size}", *WORKER)


def _start(command: tuple[str, ...], size: int = 2, environment: Mapping[str, str] = NOTHING) -> Start:
    return Start((command,), size, environment)


STARTS = {
    "python": _start(PROGRAM, 1),
    "spawn": _start((PROGRAM[0], *WORKER[:2], "spawn", "2", *WORKER[2:])),
    "torchrun": _start(_torchrun(2)),
    "horovodrun --gloo": _start((f"{BIN}/horovodrun", "--gloo", "-np", "2", *PROGRAM)),
    "horovodrun --mpi": _start(
        (f"{BIN}/horovodrun", "--mpi", "-np", "2", _MPI_ARGUMENTS, *PROGRAM),
        environment={"OMPI_MCA_btl": "tcp,self"},
    ),
    "mpirun": _start(_mpirun(2)),
    "mpiexec of MPICH": _start(("mpiexec.hydra", "-np", "2", *PROGRAM)),
    "srun": _start(("srun", "-N", "1", "-n", "2", *PROGRAM)),
    "srun --mpi=pmix": _start(("srun", "--mpi=pmix", "-N", "1", "-n", "2", *PROGRAM), environment=_TCP),
    "dualdist run": _start((PROGRAM[0], "-m", "dualdist", "run", "-np", "2", *PROGRAM)),
    "torchrun, 1 process": _start(_torchrun(1), 1),
    "mpirun, 1 process": _start(_mpirun(1), 1),
    "srun, 1 process": _start(("srun", "-n", "1", *PROGRAM), 1),
    "srun, 2+1 processes": _start(("srun", "-N", "2", "-n", "3", *PROGRAM), 3),
}

ENGINES: Mapping[str, Task] = MappingProxyType(
    {
        "torch+gloo": Task("torch", "gloo"),
        "torch+mpi": Task("torch", "mpi"),
        "horovod+gloo": Task("horovod", "gloo"),
        "horovod+mpi": Task("horovod", "mpi"),
    }
)

WORKS = ()
NO_MPI = ("but is 'mpi' instead", "Start with a launcher that starts MPI (mpirun, srun --mpi=pmix)")
OTHER_MPI = ("which mpiexec did not start", "Start with the mpirun of that library")
NOT_ITS_MPI = (
    "World size must be the 2",
    "start MPI with the mpirun of the library that the engine was built for",
)

EXPECTED: Mapping[str, tuple[tuple[str, ...], ...]] = MappingProxyType(
    {
        # started with       torch+gloo, torch+mpi, horovod+gloo, horovod+mpi
        "python": (WORKS, WORKS, WORKS, WORKS),
        "spawn": (WORKS, NO_MPI, WORKS, NO_MPI),
        "torchrun": (WORKS, NO_MPI, WORKS, NO_MPI),
        "horovodrun --gloo": (WORKS, NO_MPI, WORKS, NO_MPI),
        "horovodrun --mpi": (WORKS, WORKS, WORKS, WORKS),
        "mpirun": (WORKS, WORKS, WORKS, WORKS),
        "mpiexec of MPICH": (WORKS, OTHER_MPI, WORKS, NOT_ITS_MPI),
        "srun": (WORKS, NO_MPI, WORKS, NO_MPI),
        "srun --mpi=pmix": (WORKS, WORKS, WORKS, WORKS),
        "dualdist run": (WORKS, NO_MPI, WORKS, NO_MPI),
    }
)
"""For every launcher and engine: works, or refuses with these words."""

OTHER_SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "torchrun, 1 process": ("torch+gloo", "horovod+gloo"),
        "mpirun, 1 process": ("torch+gloo", "horovod+gloo", "torch+mpi"),
        "srun, 1 process": ("torch+gloo", "horovod+gloo"),
        "srun, 2+1 processes": ("torch+gloo", "horovod+gloo"),
    }
)

CELLS = [(start, engine) for start in EXPECTED for engine in ENGINES]
OTHER_CELLS = [(start, engine) for start, engines in OTHER_SIZES.items() for engine in engines]

Trials = Mapping[tuple[str, str], tuple[Future[Trial], int]]
"""For every cell its launch, and its place there."""

NUMBERS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
WORLDS = {
    1: [(0, 1, 0, 1, 0, 1)],
    2: [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)],
    3: [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 1), (2, 3, 0, 1, 1, 2)],
}
"""The numbers of every rank: one node, and for three processes two nodes."""


def _launches(wanted: set[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """Yield what to start, and the engines to try there: MPI once in a launch, and last."""
    for start in STARTS:
        engines = [engine for engine in ENGINES if (start, engine) in wanted]
        plain, mpi = ([e for e in engines if e.endswith("+mpi") == is_mpi] for is_mpi in (False, True))
        starts_mpi = start in EXPECTED and WORKS == EXPECTED[start][1] and start != "python"
        if starts_mpi and len(mpi) == 2:
            yield start, [*plain, mpi[0]]
            yield start, mpi[1:]
        elif engines:
            yield start, [*plain, *mpi]


@pytest.fixture(scope="module")
def trials(request: pytest.FixtureRequest) -> Iterator[Trials]:
    """Every launch that the chosen tests are about, two at a time."""
    callspecs = [
        getattr(item, "callspec", None) for item in request.session.items if item.path == request.path
    ]
    wanted = {callspec.params["cell"] for callspec in callspecs if callspec is not None}
    slurm: Slurm | None = None
    if any(start.startswith("srun") for start, _ in wanted):
        slurm = request.getfixturevalue("slurm")
    trials: dict[tuple[str, str], tuple[Future[Trial], int]] = {}
    with ThreadPoolExecutor(2) as pool:
        for name, engines in _launches(wanted):
            start = STARTS[name]
            if slurm is not None:
                start = dataclasses.replace(start, environment={**start.environment, **slurm.environment})
            future = pool.submit(try_tasks, start, [ENGINES[engine] for engine in engines])
            trials.update({(name, engine): (future, place) for place, engine in enumerate(engines)})
        yield trials


@pytest.fixture
def trial(trials: Trials, cell: tuple[str, str]) -> tuple[list[Told], str]:
    """What every process says of a cell, and the output of the launch, which must end well."""
    future, place = trials[cell]
    trial = future.result()
    assert trial.codes == [0], trial.output
    return trial.told[place], trial.output


def _judge(cell: tuple[str, str], told: list[Told], output: str) -> None:
    """Raise AssertionError unless every rank has joined the right world, on the right engine, and left it."""
    start, engine = cell
    size = STARTS[start].size
    assert [tuple(one.get(name) for name in NUMBERS) for one in told] == WORLDS[size], output
    for one in told:
        assert (one["runs"], one["sum"], one["ended"]) == (engine, int("1" * size), 0), output


@pytest.mark.parametrize("cell", CELLS, ids=" with ".join)
def test_every_launcher_with_every_engine(trial: tuple[list[Told], str], cell: tuple[str, str]) -> None:
    told, output = trial
    start, engine = cell
    words = EXPECTED[start][list(ENGINES).index(engine)]
    if words == WORKS:
        _judge(cell, told, output)
    for one in told if words else []:
        assert all(word in one.get("error", "") for word in words), f"{one}\n{output}"
        assert one["ended"] == 0, output


@pytest.mark.parametrize("cell", OTHER_CELLS, ids=" with ".join)
def test_one_process_and_uneven_nodes(trial: tuple[list[Told], str], cell: tuple[str, str]) -> None:
    _judge(cell, *trial)


def test_every_launcher_and_engine_has_its_cell() -> None:
    assert EXPECTED.keys() | OTHER_SIZES.keys() == STARTS.keys()
    assert all(len(row) == len(ENGINES) for row in EXPECTED.values())
