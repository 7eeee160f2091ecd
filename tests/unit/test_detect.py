"""Launch detection: one row per launcher, and what is wrong in an environment that contradicts itself."""

from __future__ import annotations

import pytest

from dualdist.errors import ConfigurationError
from dualdist.launch import LAUNCHERS, detect

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
}  # fmt: skip
HOROVODRUN = {
    "HOROVOD_RANK": "3", "HOROVOD_SIZE": "6", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "3",
}  # fmt: skip
SRUN = {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
}  # fmt: skip
OWN = {
    "DUALDIST_RANK": "3", "DUALDIST_SIZE": "6", "DUALDIST_LOCAL_RANK": "1", "DUALDIST_LOCAL_SIZE": "2",
}  # fmt: skip
RUN = OWN | {"DUALDIST_LAUNCHER": "dualdist run"}
SPAWN = OWN | {"DUALDIST_LAUNCHER": "spawn"}
MPIEXEC = {"PMI_RANK": "3", "PMI_SIZE": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
ENV = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}
ROWS = {
    "dualdist run": RUN, "spawn": SPAWN,
    "torchrun": TORCHRUN, "horovodrun": HOROVODRUN, "mpirun": MPIRUN, "srun": SRUN, "mpiexec": MPIEXEC, "env": ENV,
}  # fmt: skip


def test_every_row_of_the_table_is_tried_here() -> None:
    assert [launcher.name for launcher in LAUNCHERS] == list(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_each_launcher_is_known_by_its_variables(name: str) -> None:
    launch = detect(ROWS[name])
    assert (launch.launcher, launch.rank, launch.size) == (name, 3, 6)
    assert (launch.local_rank, launch.local_size) == (1, 2)
    assert launch.init_method == ("env://" if "MASTER_ADDR" in ROWS[name] else None)
    for field in ("rank", "size", "local_rank", "local_size"):
        assert launch.sources[field] in ROWS[name]


def test_plain_python_is_a_world_of_one() -> None:
    launch = detect({"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"})
    assert (launch.launcher, launch.rank, launch.size) == ("python", 0, 1)
    assert (launch.local_rank, launch.local_size, launch.init_method) == (None, None, None)


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        ("torchrun", "srun"),
        ("horovodrun", "srun"),
        ("mpirun", "srun"),
        ("torchrun", "mpirun"),
        ("srun", "env"),
    ],
)
def test_the_launcher_nearest_to_the_process_wins(inner: str, outer: str) -> None:
    assert detect(ROWS[outer] | ROWS[inner]).launcher == inner


def test_the_address_of_the_first_rank_makes_any_launcher_meet_there() -> None:
    assert detect(MPIRUN | {"MASTER_ADDR": "node1", "MASTER_PORT": "1"}).init_method == "env://"
    assert detect(MPIRUN | {"MASTER_ADDR": "node1"}).init_method is None


def test_names_that_compat_copied_for_a_script_are_not_a_launcher() -> None:
    copies = {name: value for name, value in HOROVODRUN.items() if "GLOO" not in name} | {
        "DUALDIST_COMPAT": "1"
    }
    assert detect(copies | MPIRUN).launcher == "mpirun"
    assert detect(copies | HOROVODRUN).launcher == "horovodrun"


def test_uneven_nodes_under_srun_leave_the_local_size_open() -> None:
    launch = detect(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4,2"})
    assert (launch.local_rank, launch.local_size) == (1, None)


def test_absent_local_numbers_are_left_open() -> None:
    launch = detect({"PMI_RANK": "1", "PMI_SIZE": "2"})
    assert (launch.local_rank, launch.local_size) == (None, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": ""}, ["`RANK`", "absent", "TORCHELASTIC_RUN_ID"]),
        ({"WORLD_SIZE": ""}, ["`WORLD_SIZE`", "absent", "TORCHELASTIC_RUN_ID"]),
        ({"RANK": "six"}, ["`RANK`", "whole number", "'six'", "torchrun"]),
        ({"RANK": "-1"}, ["`RANK`", "whole number", "'-1'"]),
        ({"RANK": "6"}, ["`RANK`", "less than WORLD_SIZE=6", "6 instead"]),
        ({"WORLD_SIZE": "1.5"}, ["`WORLD_SIZE`", "whole number"]),
        ({"LOCAL_RANK": "x"}, ["`LOCAL_RANK`", "whole number"]),
        ({"LOCAL_WORLD_SIZE": "2,1"}, ["`LOCAL_WORLD_SIZE`", "whole number"]),
        ({"MASTER_ADDR": ""}, ["`MASTER_ADDR`", "`MASTER_PORT`", "absent", "WORLD_SIZE=6"]),
    ],
)
def test_contradictions_are_one_line_that_names_the_variable(
    change: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        detect(TORCHRUN | change)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_value_tells_where_it_came_from() -> None:
    launch = detect(MPIRUN)
    assert launch.describe("size") == "6 (from OMPI_COMM_WORLD_SIZE)"
    assert launch.describe("rank") == "3 (from OMPI_COMM_WORLD_RANK)"
    assert detect({}).describe("size") == "1 (from plain python)"


def test_detection_changes_nothing() -> None:
    env = dict(TORCHRUN)
    assert detect(env) == detect(env) and env == TORCHRUN
