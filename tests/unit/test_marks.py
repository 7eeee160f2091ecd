"""No launched process trains alone unnoticed: environments with variables removed, nested, or of unknown launchers."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualdist.core.launch import detect, launch_from
from dualdist.core.launch.launchers import LAUNCHERS, OUTERMOST
from dualdist.core.types import Launch
from dualdist.errors import ConfigurationError
from dualdist.other_launchers import MARKS
from dualdist.processes.job import without_launchers

from .test_detect import RECORDS

LAUNCHED = sorted(name for name, record in RECORDS.items() if record["expected"].get("size") != 1)
EXAMPLE = {"(?!0*1$).+": "2", ".*,.*": '["algo-1","algo-2"]'}
"""Pattern of a mark -> a value that it accepts; 3 for all others."""


def detected(env: dict[str, str]) -> Launch | None:
    """Return what is detected, None for an error. MPI reports a world of one, as one of another launcher does."""
    with contextlib.suppress(ConfigurationError):
        return detect(env, lambda: 1)
    return None


@pytest.mark.parametrize("name", LAUNCHED)
def test_an_environment_without_one_of_its_variables_is_the_same_world_or_an_error(name: str) -> None:
    environment, expected = RECORDS[name]["environment"], RECORDS[name]["expected"]
    for variable in environment:
        launch = detected({key: value for key, value in environment.items() if key != variable})
        if launch is None or variable in expected.get("error", ()):
            # Without its only mark, a task of a launcher without a row is a process like any other.
            continue
        assert (launch.rank, launch.size) == (expected.get("rank"), expected.get("size")), variable


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_nested_launchers_without_one_variable_are_never_a_world_of_one(data: st.DataObject) -> None:
    outer = data.draw(st.lists(st.sampled_from(sorted(RECORDS)), max_size=3))
    innermost = data.draw(st.sampled_from(LAUNCHED))
    environment: dict[str, str] = {}
    for name in [*outer, innermost]:
        if RECORDS[name]["expected"].get("launcher") in OUTERMOST:  # they pass on no variable of an outer launcher
            environment = without_launchers(environment)
        environment |= RECORDS[name]["environment"]
    removable = set(RECORDS[innermost]["environment"]) - set(RECORDS[innermost]["expected"].get("error", ()))
    removed = data.draw(st.sampled_from(["", *sorted(removable)]))
    environment.pop(removed, None)
    launch = detected(environment)
    assert launch is None or launch.size > 1


@pytest.mark.parametrize(
    ("variable", "pattern"), [(variable, mark.value) for mark in MARKS for variable in mark.variables.split()]
)
def test_the_error_names_the_mark_and_how_to_say_otherwise(variable: str, pattern: str) -> None:
    value = EXAMPLE.get(pattern, "3")
    with pytest.raises(ConfigurationError) as caught:
        detect({variable: value})
    message = str(caught.value)
    assert "\n" not in message
    for word in (f"`{variable}`", repr(value), "plain python", "DUALDIST_RANK_FROM", "=python"):
        assert word in message
    assert "init(" not in message  # it may be for `dualdist exec`


def test_marks_do_not_count_where_the_user_says_who_the_process_is() -> None:
    env = {"ALPS_APP_PE": "1"}
    launch = launch_from({"rank": 1, "size": 2, "init_method": "tcp://node1:1"}, env)
    assert (launch.launcher, launch.rank, launch.size) == ("init", 1, 2)
    assert detect(env | {"DUALDIST_LAUNCHER": "python"}).size == 1


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_a_world_of_one_that_is_said_explicitly_wins_over_every_launcher(name: str) -> None:
    launch = detect(RECORDS[name]["environment"] | {"DUALDIST_LAUNCHER": "python", "WORLD_SIZE": "9"})
    assert (launch.launcher, launch.rank, launch.size, launch.by_launcher) == ("python", 0, 1, False)
    assert launch.describe("size") == "1 (from DUALDIST_LAUNCHER=python)"


def test_another_launcher_cannot_be_said() -> None:
    with pytest.raises(ConfigurationError, match=r"`DUALDIST_LAUNCHER` must be 'python' .* 'srun' instead"):
        detect({"DUALDIST_LAUNCHER": "srun"})


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_processes_of_dualdist_run_inherit_no_launcher(name: str) -> None:
    env = RECORDS[name]["environment"] | {"DUALDIST_LAUNCHER": "python", "KEPT": "yes"}
    inherited = without_launchers(env)
    assert inherited["KEPT"] == "yes" and "DUALDIST_LAUNCHER" not in inherited
    own = RECORDS["dualdist_run"]["environment"] | {f"DUALDIST_{name}": "1" for name in ("SIZE", "LOCAL_SIZE")}
    own |= {f"DUALDIST_{name}": "0" for name in ("RANK", "LOCAL_RANK")}
    assert detect(inherited | own).launcher == "dualdist run"


def test_a_task_of_one_under_slurm_carries_no_mark_of_another_launcher() -> None:
    step = RECORDS["srun_pty"]["environment"]
    assert detect(step | {"PMI_FD": "3"}).size == 1
    with pytest.raises(ConfigurationError, match="`RANK` must be absent from a single process of srun"):
        detect(step | {"RANK": "2"})


def test_mpi_reports_the_size_under_a_launcher_that_sets_only_the_rank() -> None:
    env = RECORDS["prterun"]["environment"]
    launch = detect(env, lambda: 2)
    assert (launch.launcher, launch.rank, launch.size, launch.starts_mpi) == ("prterun", 1, 2, True)
    assert launch.describe("size") == "2 (from MPI)"
    for reported, words in ((0, "MPI reports nothing"), (1, "MPI reports 1")):
        with pytest.raises(ConfigurationError, match=words):
            detect(env, lambda reported=reported: reported)  # type: ignore[misc]


def test_a_size_set_by_hand_completes_a_rank_of_pmix() -> None:
    by_hand = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "1"}
    launch = detect(RECORDS["prterun"]["environment"] | by_hand)
    assert (launch.launcher, launch.rank, launch.size) == ("env", 1, 2)


@pytest.mark.parametrize("name", ["srun", "openmpi4", "mpich", "pals"])
def test_rank_0_of_a_container_or_site_agrees_with_a_single_process(name: str) -> None:
    record = RECORDS[name]
    env = dict(record["environment"])
    row = next(row for row in LAUNCHERS if row.name == record["expected"]["launcher"])
    env |= {name: "0" for name in env if name in (row.rank, row.local_rank, "PMIX_RANK", "PMI_RANK")}
    env |= {name: "1" for name in env if name in (row.size, row.local_size)}
    assert detect({**env, "RANK": "0", "LOCAL_RANK": "0"}).size == 1
    with pytest.raises(ConfigurationError, match="`RANK` must be absent from a single process of"):
        detect({**env, "RANK": "2"})
