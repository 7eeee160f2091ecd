"""Every launcher with every backend: each pair works, or refuses within 20 seconds and says what to do instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import pytest

from ..helpers.at_once import chosen
from ..helpers.forks import BIN
from ..helpers.requirements import need_modules, need_programs
from ..helpers.slurm_cluster import Slurm
from ..helpers.task_launch import PROGRAM, WORKER, Launches, Report, Start, check_joined, reports_of, run_tasks
from ..helpers.task_worker import Task
from ..helpers.world import MPIRUN

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
        (f"{BIN}/horovodrun", "--mpi", "-np", "2", _MPI_ARGUMENTS, *PROGRAM), environment={"OMPI_MCA_btl": "tcp,self"}
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

BACKENDS: Mapping[str, Task] = MappingProxyType(
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
NOT_ITS_MPI = ("World size must be the 2", "Start MPI with the mpirun of the library that the backend was built for")

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
"""For every launcher and backend: works, or refuses with these words."""

OTHER_SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "torchrun, 1 process": ("torch+gloo", "horovod+gloo"),
        "mpirun, 1 process": ("torch+gloo", "horovod+gloo", "torch+mpi"),
        "srun, 1 process": ("torch+gloo", "horovod+gloo"),
        "srun, 2+1 processes": ("torch+gloo", "horovod+gloo"),
    }
)

PAIRS = [(start, backend) for start in EXPECTED for backend in BACKENDS]
OTHER_PAIRS = [(start, backend) for start, backends in OTHER_SIZES.items() for backend in backends]


def _launches(wanted: set[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """Yield what to start, and the backends to try there: MPI once in a launch, and last."""
    for start in STARTS:
        backends = [backend for backend in BACKENDS if (start, backend) in wanted]
        plain, mpi = ([e for e in backends if e.endswith("+mpi") == is_mpi] for is_mpi in (False, True))
        starts_mpi = start in EXPECTED and WORKS == EXPECTED[start][1] and start != "python"
        if starts_mpi and len(mpi) == 2:
            yield start, [*plain, mpi[0]]
            yield start, mpi[1:]
        elif backends:
            yield start, [*plain, *mpi]


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest) -> Iterator[Launches]:
    """Every launch that the chosen tests are about, two at a time."""
    wanted = set(chosen(request, "pair"))
    slurm: Slurm | None = None
    if any(start.startswith("srun") for start, _ in wanted):
        slurm = request.getfixturevalue("slurm")
    launches: Launches = {}
    with ThreadPoolExecutor(2) as pool:
        for name, backends in _launches(wanted):
            start = STARTS[name]
            if slurm is not None:
                start = dataclasses.replace(start, environment={**start.environment, **slurm.environment})
            future = pool.submit(run_tasks, start, [BACKENDS[backend] for backend in backends])
            launches.update({(name, backend): (future, place) for place, backend in enumerate(backends)})
        yield launches


@pytest.fixture
def reports(launches: Launches, pair: tuple[str, str]) -> tuple[list[Report], str]:
    start, backend = pair
    need_programs(STARTS[start].commands[0][0])
    need_modules("mpi4py", *["horovod"] * backend.startswith("horovod"))
    return reports_of(launches, pair)


@pytest.mark.parametrize("pair", PAIRS, ids=" with ".join)
def test_every_launcher_starts_every_backend_or_says_what_does(
    reports: tuple[list[Report], str], pair: tuple[str, str]
) -> None:
    ranks, output = reports
    start, backend = pair
    words = EXPECTED[start][list(BACKENDS).index(backend)]
    if words == WORKS:
        check_joined(ranks, backend, output)
    for one in ranks if words else []:
        assert all(word in one.get("error", "") for word in words), f"{one}\n{output}"
        assert one["ended"] == 0, output


@pytest.mark.parametrize("pair", OTHER_PAIRS, ids=" with ".join)
def test_one_process_and_uneven_nodes_join_the_right_world(
    reports: tuple[list[Report], str], pair: tuple[str, str]
) -> None:
    ranks, output = reports
    check_joined(ranks, pair[1], output, nodes=2 if "+" in pair[0] else 1)


def test_every_launcher_and_backend_is_in_the_table() -> None:
    assert EXPECTED.keys() | OTHER_SIZES.keys() == STARTS.keys()
    assert all(len(row) == len(BACKENDS) for row in EXPECTED.values())
