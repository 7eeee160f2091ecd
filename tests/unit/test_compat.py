"""dualdist.compat's command line, and its copies of horovodrun's variables, which launch detection ignores."""

from __future__ import annotations

import pytest

from dualdist.compat import __main__ as command_line
from dualdist.compat.environment import MARK, export_launch, export_world
from dualdist.compat.util import num_rank_is_power_2, split_list
from dualdist.launch import detect
from dualdist.types import World

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_the_launcher_is_still_detected_beside_the_copies() -> None:
    for env in ({}, MPIRUN):
        exported = {**env, MARK: "1"}
        export_launch(exported)
        assert exported["HOROVOD_SIZE"] == env.get("OMPI_COMM_WORLD_SIZE", "1")
        assert detect(exported) == detect(env)


def test_a_horovodrun_inside_is_detected() -> None:
    horovodrun = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}
    found = detect({MARK: "1", **horovodrun})
    assert (found.launcher, found.rank, found.size) == ("horovodrun", 1, 2)


def test_only_known_numbers_are_exported_before_init() -> None:
    env = dict(MPIRUN)
    export_launch(env)
    assert env["HOROVOD_LOCAL_RANK"] == "1"
    assert "HOROVOD_CROSS_RANK" not in env
    export_world(World(3, 4, 1, 2, 1, 2), env)
    assert env["HOROVOD_CROSS_RANK"] == "1"
    assert env["HOROVOD_CROSS_SIZE"] == "2"


def test_contradictory_variables_are_left_to_init() -> None:
    env = {"OMPI_COMM_WORLD_SIZE": "2"}
    export_launch(env)
    assert env == {"OMPI_COMM_WORLD_SIZE": "2"}


def test_power_of_two_and_split_list_are_those_of_horovod_common() -> None:
    assert [num for num in range(9) if num_rank_is_power_2(num)] == [1, 2, 4, 8]
    assert split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]


@pytest.mark.parametrize("arguments", [["no/such/script.py"], ["-m", "no.such.module"], ["-m"], ["-x"], []])
def test_a_target_that_cannot_be_run_ends_with_code_2_and_a_reason(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "install", lambda: None)
    assert command_line.main(arguments) == 2
    assert "dualdist.compat" in capsys.readouterr().err
