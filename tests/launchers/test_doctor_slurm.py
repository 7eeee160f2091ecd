"""`dualdist doctor --world` in a step of Slurm. Both nodes are this host."""

from __future__ import annotations

import sys

import pytest

from ..helpers.slurm_cluster import Slurm

STEP = ("srun", "-N", "2", "-n", "3")
DOCTOR = (sys.executable, "-m", "tests.helpers.faulty_doctor")


@pytest.mark.parametrize("mpi", ["none", "pmix"])
def test_the_processes_of_a_step_meet(slurm: Slurm, mpi: str) -> None:
    ended = slurm.finish(*STEP, f"--mpi={mpi}", *DOCTOR, "{}")
    assert ended.code == 0, ended.output
    assert ended.output.count("World of 3 processes on 1 host, started by srun; backend: torch\n") == 1
    assert ended.output.count("This allocation can train.\n") == 1


def test_a_task_that_never_arrives_is_named(slurm: Slurm) -> None:
    timeout = {"DUALDIST_START_TIMEOUT_SECONDS": "3"}
    ended = slurm.finish(*STEP, "--kill-on-bad-exit=1", *DOCTOR, '{"absent": 2}', environment=timeout)
    assert ended.code != 0
    assert ended.output.count("WRONG: Rank 0 waited 3 s for rank 2, which did not arrive.") == 1
