"""Launch detection: each launcher by its variables, and errors for environments that contradict themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dualdist.errors import ConfigurationError
from dualdist.launch import LAUNCHERS, detect
from dualdist.launch.environment import add_copies

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
HOROVODRUN = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "6",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "6",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
MPIRUN_RSH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "6",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
OWN = {
    "DUALDIST_RANK": "3",
    "DUALDIST_SIZE": "6",
    "DUALDIST_LOCAL_RANK": "1",
    "DUALDIST_LOCAL_SIZE": "2",
    "DUALDIST_RENDEZVOUS": "127.0.0.1:1234",
    "DUALDIST_SECRET": "00",
}
MPIEXEC = {"PMI_RANK": "3", "PMI_SIZE": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
FLUX = {
    "FLUX_TASK_RANK": "3",
    "FLUX_JOB_SIZE": "6",
    "FLUX_TASK_LOCAL_ID": "1",
}
PALS = {
    "PALS_RANKID": "3",
    "PMI_SIZE": "6",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "PMI_RANK": "3",
}
PRTERUN = {"PRTE_LAUNCHED": "1", "PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-node1-7@1"}
PMIX = {"PMIX_RANK": "3", "PMIX_NAMESPACE": "7"}
ENV = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}
ROWS = {
    "torchrun": TORCHRUN,
    "horovodrun": HOROVODRUN,
    "jsrun": JSRUN,
    "mpirun": MPIRUN,
    "mpirun_rsh": MPIRUN_RSH,
    "srun": SRUN,
    "flux": FLUX,
    "PALS": PALS,
    "mpiexec": MPIEXEC,
    "prterun": PRTERUN,
    "PMIx": PMIX,
    "dualdist run": OWN | {"DUALDIST_LAUNCHER": "dualdist run"},
    "spawn": OWN | {"DUALDIST_LAUNCHER": "spawn"},
    "env": ENV,
}
OTHER = {"1": "0", "3": "1", "6": "2", "2": "1", "2(x3)": "1(x2)"}
"""Number of the inner launcher's world -> number of the outer launcher's world."""


FIXTURES = sorted((Path(__file__).parent / "environments").glob("*.json"))


def test_every_row_of_the_table_is_tested() -> None:
    assert [launcher.name for launcher in LAUNCHERS] == list(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_each_launcher_is_recognised_by_its_variables(name: str) -> None:
    launch = detect(ROWS[name], lambda: 6)
    assert (launch.launcher, launch.rank, launch.size) == (name, 3, 6)
    row = next(row for row in LAUNCHERS if row.name == name)
    assert (launch.local_rank, launch.local_size) == (row.local_rank and 1, row.local_size and 2)
    assert launch.init_method == ("env://" if "MASTER_ADDR" in ROWS[name] else None)
    for field in ("rank", "size", "local_rank", "local_size"):
        assert launch.sources.get(field, "MPI") in {*ROWS[name], "MPI"}


def test_plain_python_is_a_world_of_one() -> None:
    launch = detect({"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"})
    assert (launch.launcher, launch.rank, launch.size) == ("python", 0, 1)
    assert (launch.local_rank, launch.local_size, launch.init_method) == (None, None, None)


def of_another_world(name: str) -> dict[str, str]:
    return {key: OTHER.get(value, value) for key, value in ROWS[name].items()}


MPI = ("mpirun", "mpirun_rsh", "mpiexec", "prterun", "PMIx")
SCHEDULERS = ("jsrun", "srun", "flux", "PALS")
NESTED = [
    (inner, outer)
    for inner in ROWS
    for outer in ROWS
    if (inner in ("torchrun", "horovodrun") and outer in (*MPI, *SCHEDULERS))
    or (inner in MPI and outer in SCHEDULERS)
    or (inner == "flux" and outer in ("jsrun", "srun", "PALS"))
    or (outer == "dualdist run" and inner not in (outer, "spawn", "env"))
    or (outer == "spawn" and inner not in (outer, "env", "dualdist run"))
]


@pytest.mark.parametrize(("inner", "outer"), NESTED)
def test_the_launcher_nearest_to_the_process_wins(inner: str, outer: str) -> None:
    launch = detect(of_another_world(outer) | ROWS[inner], lambda: 6)
    assert (launch.launcher, launch.rank, launch.size) == (inner, 3, 6)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("mpirun", "env"),
        ("srun", "env"),
        ("horovodrun", "env"),
        ("torchrun", "horovodrun"),
        ("mpirun", "mpiexec"),
    ],
)
def test_the_error_names_both_launchers_that_disagree(one: str, other: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        detect(of_another_world(other) | ROWS[one])
    message = str(caught.value)
    for name in (one, other):
        assert f"of {name}" in message
    for word in ("3 (from ", "6 (from ", "1 (from ", "2 (from ", "Unset"):
        assert word in message


@pytest.mark.parametrize(
    ("one", "other"), [("mpirun", "env"), ("srun", "env"), ("jsrun", "mpirun"), ("srun", "mpiexec")]
)
def test_of_launchers_that_agree_the_first_row_is_reported(one: str, other: str) -> None:
    launch = detect(ROWS[one] | ROWS[other])
    assert (launch.launcher, launch.rank, launch.size) == (one, 3, 6)


def test_a_world_size_that_a_batch_script_exports_is_ignored_under_srun() -> None:
    assert detect(SRUN | {"WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "1"}).launcher == "srun"


def test_the_tasks_of_an_allocation_are_listed_as_ignored() -> None:
    launch = detect({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"})
    assert (launch.launcher, launch.rank, launch.size) == ("python", 0, 1)
    assert launch.ignored == ("SLURM_NTASKS=4",)


def test_nodes_meant_for_torchrun_are_an_error_without_it() -> None:
    with pytest.raises(ConfigurationError, match="`torchrun` must be the command where PET_NNODES=2 is set"):
        detect({"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "auto"})


def test_a_world_size_without_a_rank_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="`RANK` must be set beside WORLD_SIZE=4"):
        detect({"WORLD_SIZE": "4"})
    assert detect({"WORLD_SIZE": "1"}).size == 1


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_recorded_environments_are_detected(path: Path) -> None:
    record = json.loads(path.read_text())
    assert record["source"].startswith(("Recorded", "From recordings", "From documentation", "Written down"))
    if "error" in record["expected"]:
        with pytest.raises(ConfigurationError) as caught:
            detect(record["environment"])
        assert [word for word in record["expected"]["error"] if word not in str(caught.value)] == []
        return
    launch = detect(record["environment"])
    found = {field: getattr(launch, field) for field in record["expected"]}
    assert found == record["expected"]


@pytest.mark.parametrize("name", ROWS)
def test_mpi_starts_under_its_own_launchers_and_srun_with_pmix(name: str) -> None:
    assert detect(ROWS[name], lambda: 6).starts_mpi == (name in ("jsrun", "PALS", *MPI))
    assert detect(SRUN | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.7.0"}).starts_mpi
    assert not detect(of_another_world("mpirun") | TORCHRUN).starts_mpi


@pytest.mark.parametrize("name", ROWS)
def test_horovod_starts_under_its_own_launchers_alone(name: str) -> None:
    assert detect(ROWS[name], lambda: 6).starts_horovod == (name in ("horovodrun", "mpirun"))


def test_the_address_of_rank_0_is_the_meeting_point_under_any_launcher() -> None:
    assert detect(MPIRUN | {"MASTER_ADDR": "node1", "MASTER_PORT": "1"}).init_method == "env://"
    assert detect(MPIRUN | {"MASTER_ADDR": "node1"}).init_method is None


def test_variables_that_compat_copied_for_a_script_are_not_a_launcher() -> None:
    copies: dict[str, str] = {}
    add_copies({name: value for name, value in HOROVODRUN.items() if "GLOO" not in name}, copies)
    assert detect(copies | MPIRUN).launcher == "mpirun"
    assert detect({**copies, **HOROVODRUN, "HOROVOD_GLOO_RENDEZVOUS_PORT": "7001"}).launcher == "horovodrun"


def test_uneven_nodes_under_srun_leave_the_local_size_unknown_without_a_node_number() -> None:
    launch = detect(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4,2"})
    assert (launch.local_rank, launch.local_size) == (1, None)


@pytest.mark.parametrize(("node", "size"), [("0", 4), ("1", 4), ("2", 3), ("3", None)])
def test_the_local_size_of_uneven_nodes_is_found_by_the_node_number(node: str, size: int | None) -> None:
    assert detect(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": node}).local_size == size


def test_a_local_rank_beyond_slurms_list_is_accepted() -> None:
    """The list may be that of another part of a heterogeneous job."""
    assert detect(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x6)"}).local_rank == 1


def test_absent_local_numbers_stay_unknown() -> None:
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
        ({"LOCAL_RANK": "7"}, ["`LOCAL_RANK`", "less than LOCAL_WORLD_SIZE=", "7 instead"]),
        ({"LOCAL_WORLD_SIZE": "2,1"}, ["`LOCAL_WORLD_SIZE`", "whole number"]),
        ({"LOCAL_WORLD_SIZE": "-2"}, ["`LOCAL_WORLD_SIZE`", "whole number", "'-2'"]),
        ({"LOCAL_WORLD_SIZE": "0"}, ["`LOCAL_WORLD_SIZE`", "at least 1", "WORLD_SIZE=6", "0 instead"]),
        ({"LOCAL_WORLD_SIZE": "7"}, ["`LOCAL_WORLD_SIZE`", "at most WORLD_SIZE=6", "7 instead", "torchrun"]),
        ({"MASTER_PORT": "abc"}, ["`MASTER_PORT`", "'abc' instead"]),
        ({"MASTER_PORT": "65536"}, ["`MASTER_PORT`", "'65536' instead"]),
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


def test_an_error_says_that_variables_of_no_launcher_are_set_by_the_job() -> None:
    for change in ({"LOCAL_RANK": "-1"}, {"LOCAL_RANK": "2"}, {"LOCAL_WORLD_SIZE": "7"}):
        with pytest.raises(ConfigurationError, match=r"instead\. Correct it where your job sets it\.$"):
            detect(ENV | change)


def test_describe_names_the_source_of_a_value() -> None:
    launch = detect(MPIRUN)
    assert launch.describe("size") == "6 (from OMPI_COMM_WORLD_SIZE)"
    assert launch.describe("rank") == "3 (from OMPI_COMM_WORLD_RANK)"
    assert detect({}).describe("size") == "1 (from plain python)"


def test_detection_does_not_change_the_environment() -> None:
    env = dict(TORCHRUN)
    assert detect(env) == detect(env) and env == TORCHRUN


@pytest.mark.parametrize(
    ("change", "restarts"),
    [
        ({}, False),
        ({"TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, True),
        ({"TORCHELASTIC_MAX_RESTARTS": "0", "DUALDIST_ELASTIC_DIR": "/data"}, True),
    ],
)
def test_torchrun_restarts_processes_only_when_it_may(change: dict[str, str], restarts: bool) -> None:
    assert detect(TORCHRUN | change).restarts == restarts
    assert not detect(HOROVODRUN | change).restarts
