"""Models that torch shards over the joined world have the weights of one process with the whole batches."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dualdist

from ..helpers import foreign_checkpoints, sharded_training
from ..helpers.requirements import need_modules
from ..helpers.run_command import Run
from ..helpers.script_launch import SECONDS
from ..helpers.world import MPIRUN, WORLD_KINDS, World, WorldKind

pytestmark = [pytest.mark.only_ci, pytest.mark.usefixtures("python")]

SIZE = 4
SRUN = ("srun", "-N", "1", "-n", "{size}", "--overcommit")
GLOO, MPI = ({"DUALDIST_BACKEND": "torch", "DUALDIST_TRANSPORT": transport} for transport in ("gloo", "mpi"))
TCP = {"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "lo"}
"""As MPIRUN says on its command line."""
KINDS = {
    kind.name: kind
    for kind in (
        *WORLD_KINDS[1:],
        WorldKind("mpirun-gloo", MPIRUN, GLOO),
        WorldKind("srun-gloo", SRUN, GLOO),
        WorldKind("srun-mpi", (*SRUN, "--mpi=pmix"), {**MPI, **TCP}, modules=("mpi4py",)),
    )
}


@pytest.fixture(scope="module", params=KINDS)
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    """Four ranks under each launcher and on each transport."""
    environment = request.getfixturevalue("slurm").environment if "srun" in request.param else None
    made = World(KINDS[request.param], SIZE, environment)
    yield made
    made.close()


@functools.cache
def expected() -> list[float]:
    return sharded_training.alone()


@pytest.mark.only_all(where=lambda ranks: ranks not in ("torch-gloo", "torch-mpi", "horovod-gloo"))
@pytest.mark.parametrize("kind", sharded_training.KINDS)
def test_a_sharded_model_has_the_weights_of_one_process(kind: str, ranks: World) -> None:
    for found in ranks.run(sharded_training.with_shards, kind):
        assert found == pytest.approx(expected(), rel=0, abs=1e-10)


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.only_all), True])
def test_a_run_resumes_on_another_number_of_ranks_and_another_mesh(asynchronous: bool, tmp_path: Path) -> None:
    """Steps 0 to 2 on two ranks, to 4 on three, to 6 on four with shards on pairs, and to 8 on one."""
    for number, size in enumerate((2, 3, 4, 1), 1):
        arguments = (str(tmp_path), 2 * number, asynchronous)
        wanted = pytest.approx(sharded_training.alone(2 * number), rel=0, abs=1e-10)
        for found in dualdist.spawn(sharded_training.resumed, arguments, nprocs=size, timeout=100):
            assert found == wanted


@pytest.mark.parametrize("package", ["accelerate", pytest.param("fabric", marks=pytest.mark.only_all)])
def test_another_package_loads_our_checkpoint_and_we_theirs(package: str, tmp_path: Path) -> None:
    need_modules("lightning" if package == "fabric" else package)
    work = getattr(foreign_checkpoints, f"of_{package}")
    for mine, theirs, ours in dualdist.spawn(work, (str(tmp_path),), nprocs=2, backend="torch", timeout=SECONDS):
        assert theirs == mine
        assert ours == mine


def test_the_example_resumes_on_another_number_of_ranks(tmp_path: Path, run: Run) -> None:
    flags = ("examples/fsdp.py", "--checkpoint-dir", str(tmp_path), "--save-every", "2", "--batch", "8")
    first = run("-np", "2", sys.executable, *flags, "--steps", "2")
    second = run("-np", "4", sys.executable, *flags, "--steps", "10", "--shards", "2")
    assert (first.code, second.code) == (0, 0), first.errors + second.errors
    assert re.fullmatch(rb"step 10: loss [345]\.\d+ on 4 processes, 2 shards\n", second.written(0))
    names = sorted(path.name for path in tmp_path.glob("step*"))
    assert names == [f"step-{step:09d}" for step in (6, 8, 10)]


def test_a_batch_of_the_example_has_at_least_one_row_of_each_process(run: Run) -> None:
    flags = ("examples/fsdp.py", "--batch", "1", "--accumulate", "3", "--steps", "10")
    ended = run("-np", "2", sys.executable, *flags)
    assert ended.code == 0
    assert re.fullmatch(rb"step 10: loss \d\.\d+ on 2 processes, 2 shards\n", ended.written(0))
