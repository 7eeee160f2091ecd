"""The launch that the arguments of `init` describe, alone or on top of a launcher's."""

from __future__ import annotations

from typing import Any

import pytest

from dualdist.core.launch import detect, launch_from
from dualdist.core.meeting import Meeting, find_board
from dualdist.errors import ConfigurationError

from .test_detect import TORCHRUN


def test_no_argument_is_what_the_environment_says() -> None:
    assert launch_from({"rank": None, "size": None, "init_method": None}, TORCHRUN) == detect(TORCHRUN)


def test_all_arguments_need_no_launcher() -> None:
    launch = launch_from({"rank": 1, "size": 2, "init_method": "tcp://host:1"}, {})
    assert (launch.rank, launch.size, launch.init_method) == (1, 2, "tcp://host:1")
    assert launch.sources["size"] == "init(world_size=)"


def test_an_address_alone_serves_the_processes_of_a_launcher() -> None:
    launch = launch_from({"init_method": "tcp://host:1"}, TORCHRUN)
    assert (launch.rank, launch.size, launch.init_method) == (3, 6, "tcp://host:1")


def test_env_is_an_address_for_a_single_process() -> None:
    assert launch_from({"init_method": "env://"}, {}).size == 1


def test_a_world_of_one_needs_no_address() -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1"}
    for launch in (detect(env), launch_from({"init_method": "env://"}, {})):
        board = find_board(launch, env)
        assert board is not None
        with Meeting(board, 0, 1, timeout=10.0) as meeting:
            assert meeting.gather("alone") == ["alone"]


def test_the_error_for_an_absent_address_says_that_a_launcher_may_need_none() -> None:
    env = {name: value for name, value in TORCHRUN.items() if not name.startswith("MASTER_")}
    launch = launch_from({"rank": 1, "size": 2, "init_method": "env://"}, env)
    with pytest.raises(ConfigurationError, match="leave init_method out"):
        find_board(launch, env)


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"init_method": "tcp://host:1"}, "rank"),
        ({"init_method": "file:///shared/file"}, "rank"),
        ({"init_method": "file:///shared/file", "rank": 0}, "world_size"),
        ({"init_method": "tcp://host:1", "size": 2}, "rank"),
        ({"rank": 0}, "world_size"),
        ({"size": 2}, "rank"),
        ({"rank": 0, "size": 2}, "init_method"),
    ],
)
def test_some_arguments_without_a_launcher_are_refused(given: dict[str, Any], missing: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^`{missing}` must be given"):
        launch_from(given, {})


@pytest.mark.parametrize(("field", "name", "value"), [("rank", "rank", 0), ("size", "world_size", 4)])
def test_an_argument_that_contradicts_the_launcher_is_refused(field: str, name: str, value: int) -> None:
    variable = {"rank": r"3 \(from RANK\)", "size": r"6 \(from WORLD_SIZE\)"}[field]
    with pytest.raises(
        ConfigurationError, match=rf"^`{name}` must be the {variable} that torchrun.* is {value} instead"
    ):
        launch_from({field: value}, TORCHRUN)
    assert getattr(launch_from({field: value, "init_method": "env://"}, TORCHRUN), field) == value
    assert launch_from({field: getattr(detect(TORCHRUN), field)}, TORCHRUN).rank == 3


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^`rank` must be at least 0 and less than world_size=2"):
        launch_from({"rank": 2, "size": 2, "init_method": "env://"}, {})


def test_a_world_without_processes_does_not_blame_the_rank() -> None:
    with pytest.raises(ConfigurationError, match=r"^`WORLD_SIZE` must be at least 1, but is 0 instead"):
        detect({"RANK": "0", "WORLD_SIZE": "0"})


@pytest.mark.parametrize("address", ["garbage", "host:", ":1", "host:port", "host:0", "host:70000"])
def test_an_address_that_the_launcher_did_not_set_is_named(address: str) -> None:
    env = {
        "DUALDIST_LAUNCHER": "dualdist run",
        "DUALDIST_RANK": "0",
        "DUALDIST_SIZE": "2",
        "DUALDIST_RENDEZVOUS": address,
    }
    with pytest.raises(ConfigurationError, match=r"^`DUALDIST_RENDEZVOUS` must be 'host:port', but is"):
        find_board(detect(env), env)
