"""Launch detection: each launcher by its variables, and errors for environments that contradict themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dualdist.core.launch import detect
from dualdist.core.launch.launchers import LAUNCHERS
from dualdist.errors import ConfigurationError


def numbers(prefix: str, names: str = "RANK SIZE LOCAL_RANK LOCAL_SIZE", **others: str) -> dict[str, str]:
    """Return the variables of rank 3 of 6, with local rank 1 of 2, and `others`."""
    return {prefix + name: number for name, number in zip(names.split(), "3612", strict=False)} | others


ENV = numbers("", "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE", MASTER_ADDR="node1", MASTER_PORT="29500")
TORCHRUN = ENV | {"TORCHELASTIC_RUN_ID": "none"}
HOROVODRUN = numbers("HOROVOD_", HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1")
MPIRUN = numbers("OMPI_COMM_WORLD_", PMIX_RANK="3")
SRUN = numbers("SLURM_", "PROCID STEP_NUM_TASKS LOCALID", SLURM_STEP_ID="0", SLURM_STEP_TASKS_PER_NODE="2(x3)")
JSRUN = numbers("JSM_NAMESPACE_", PMIX_RANK="3")
MPIRUN_RSH = numbers("MV2_COMM_WORLD_")
OWN = numbers("DUALDIST_", DUALDIST_RENDEZVOUS="127.0.0.1:1234", DUALDIST_SECRET="00")
MPIEXEC = numbers("", "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS")
FLUX = numbers("FLUX_", "TASK_RANK JOB_SIZE TASK_LOCAL_ID")
PALS = numbers("", "PALS_RANKID PMI_SIZE PALS_LOCAL_RANKID PALS_LOCAL_SIZE", PMI_RANK="3")
PRTERUN = {"PRTE_LAUNCHED": "1", "PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-node1-7@1"}
PMIX = {"PMIX_RANK": "3", "PMIX_NAMESPACE": "7"}
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


RECORDS = {
    path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "environments").glob("*.json"))
}


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
    assert launch.starts_mpi == (name in ("jsrun", "PALS", *MPI))
    assert launch.starts_horovod == (name in ("horovodrun", "mpirun"))


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
    [("mpirun", "env"), ("srun", "env"), ("horovodrun", "env"), ("torchrun", "horovodrun"), ("mpirun", "mpiexec")],
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


@pytest.mark.parametrize("batch_script", [{}, {"SLURM_PROCID": "0"}])
def test_plain_python_is_a_world_of_one_that_ignores_the_tasks_of_an_allocation(batch_script: dict[str, str]) -> None:
    launch = detect({"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", **batch_script})
    assert (launch.launcher, launch.rank, launch.size) == ("python", 0, 1)
    assert (launch.local_rank, launch.local_size, launch.init_method) == (None, None, None)
    assert launch.ignored == ("SLURM_NTASKS=4",)


def test_nodes_meant_for_torchrun_are_an_error_without_it() -> None:
    with pytest.raises(ConfigurationError, match="`torchrun` must be the command where PET_NNODES=2 is set"):
        detect({"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "auto"})


def test_a_world_size_without_a_rank_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="`RANK` must be set beside WORLD_SIZE=4"):
        detect({"WORLD_SIZE": "4"})
    assert detect({"WORLD_SIZE": "1"}).size == 1


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_recorded_environments_are_detected(record: dict[str, Any]) -> None:
    assert record["source"].startswith(("Recorded", "From recordings", "From documentation", "Written down"))
    if "error" in record["expected"]:
        with pytest.raises(ConfigurationError) as caught:
            detect(record["environment"])
        assert [word for word in record["expected"]["error"] if word not in str(caught.value)] == []
        return
    launch = detect(record["environment"])
    found = {field: getattr(launch, field) for field in record["expected"]}
    assert found == record["expected"]


def test_mpi_starts_under_srun_with_pmix_and_not_under_a_torchrun_inside_mpirun() -> None:
    assert detect(SRUN | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.7.0"}).starts_mpi
    assert not detect(of_another_world("mpirun") | TORCHRUN).starts_mpi


def test_the_address_of_rank_0_is_the_meeting_point_under_any_launcher() -> None:
    assert detect(MPIRUN | {"MASTER_ADDR": "node1", "MASTER_PORT": "1"}).init_method == "env://"
    assert detect(MPIRUN | {"MASTER_ADDR": "node1"}).init_method is None


@pytest.mark.parametrize(
    ("tasks", "node", "size"),
    [
        *(("4(x2),3", node, size) for node, size in (("0", 4), ("1", 4), ("2", 3), ("3", None))),
        ("4,2", "", None),
        ("1(x6)", "", 1),  # the list may be that of another part of a heterogeneous job
    ],
)
def test_the_local_size_of_uneven_nodes_is_found_by_the_node_number(tasks: str, node: str, size: int | None) -> None:
    launch = detect(SRUN | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node})
    assert (launch.local_rank, launch.local_size) == (1, size)


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
def test_contradictions_are_one_line_that_names_the_variable(change: dict[str, str], words: list[str]) -> None:
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
