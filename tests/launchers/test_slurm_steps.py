"""Steps of Slurm with each kind of PMI: `dualdist doctor --world`, and joining. Both nodes are this host."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ..helpers.forks import MPI_FOLDER
from ..helpers.requirements import need
from ..helpers.slurm_cluster import Slurm
from ..helpers.task_launch import PROGRAM, Start, check_joined, run_tasks
from ..helpers.task_worker import Task

STEP = ("srun", "-N", "2", "-n", "3")
DOCTOR = (sys.executable, "-m", "tests.helpers.faulty_doctor")


def test_without_pmix_the_default_transport_is_gloo(slurm: Slurm) -> None:
    start = Start(((*STEP, "--mpi=pmi2", *PROGRAM),), 3, slurm.environment)
    outcome = run_tasks(start, [Task("torch", None)])
    check_joined(outcome.reports[0], "torch+gloo", outcome.output, nodes=2)


@pytest.mark.only_ci
def test_mpich_starts_by_pmi2(slurm: Slurm) -> None:
    libraries = MPI_FOLDER / "mpich" / "lib"
    need(libraries.exists(), "needs the wheel mpich")
    # With UCX, MPICH sends 4 KiB of its memory in lines of text, which may be longer than Slurm reads (1,023 bytes).
    network = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
    variables = {**slurm.environment, "LD_LIBRARY_PATH": str(libraries), **network}
    start = Start(((*STEP, "--mpi=pmi2", *PROGRAM),), 3, variables, forks=False)
    outcome = run_tasks(start, [Task("torch", "mpi")])
    check_joined(outcome.reports[0], "torch+mpi", outcome.output, nodes=2)


@pytest.mark.only_ci(where=lambda mpi: mpi != "pmix")
@pytest.mark.parametrize("mpi", ["none", "pmi2", "pmix"])
def test_the_processes_of_a_step_meet(slurm: Slurm, mpi: str) -> None:
    output = slurm.finish(*STEP, f"--mpi={mpi}", *DOCTOR, "{}").check()
    assert output.count("World of 3 processes on 1 host, started by srun; backend: torch\n") == 1
    assert output.count("This allocation can train.\n") == 1


@pytest.mark.only_ci
def test_a_task_that_never_arrives_is_named(slurm: Slurm, tmp_path: Path) -> None:
    timeout = {"DUALDIST_START_TIMEOUT_SECONDS": "3"}
    faults = json.dumps({"absent": 2, "begun": str(tmp_path)})
    ended = slurm.finish(*STEP, "--kill-on-bad-exit=1", *DOCTOR, faults, environment=timeout)
    assert ended.code != 0
    assert ended.output.count("WRONG: Rank 0 waited 3 s for rank 2, which did not arrive.") == 1
