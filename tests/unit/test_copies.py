"""The variables of torchrun and horovodrun that `dualdist run` and `spawn` set beside their own."""

from __future__ import annotations

import pytest

from dualdist.copies import add_copies, agent_variables, copied_variables, remove_copies, torchrun_variables
from dualdist.core.launch import detect, without_copies
from dualdist.core.types import World
from dualdist.errors import ConfigurationError
from dualdist.horovod import horovod_variables
from dualdist.processes.job import process_variables, without_launchers

WORLD = World(1, 2, 1, 2, 0, 1)
OWN = process_variables("dualdist run", WORLD, "127.0.0.1:7", b"")
COPIES = copied_variables(
    torchrun_variables(WORLD, ["here", "here"], ("127.0.0.1", 7001)) | agent_variables("dualdist-1", {}),
    horovod_variables(WORLD, ("127.0.0.1", 7002), "here", "lo"),
    given={},
)
STARTED = {**OWN, **COPIES}


def test_a_process_has_the_variables_of_torchrun_and_of_horovodrun() -> None:
    expected = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    expected |= {"MASTER_PORT": "7001", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "1"}
    expected |= {"HOROVOD_RANK": "1", "HOROVOD_CROSS_SIZE": "1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "7002"}
    assert expected.items() <= COPIES.items()


def test_launch_detection_ignores_copies() -> None:
    assert detect(STARTED) == detect(OWN)
    # dualdist.compat sets the numbers of the world that was joined.
    assert detect({**STARTED, "HOROVOD_LOCAL_SIZE": "3"}) == detect(OWN)
    assert without_copies(STARTED) == {**OWN, "DUALDIST_COPIES": COPIES["DUALDIST_COPIES"]}


def test_a_launcher_inside_is_detected_although_its_numbers_are_those_of_the_copies() -> None:
    horovodrun = {**STARTED, "HOROVOD_GLOO_RENDEZVOUS_PORT": "7009"}
    assert detect(horovodrun).launcher == "horovodrun"
    torchrun = {**STARTED, "TORCHELASTIC_RUN_ID": "none"}
    assert detect(torchrun).launcher == detect({**torchrun, "MASTER_PORT": "7009"}).launcher == "torchrun"


def test_a_setting_that_the_script_changes_is_no_copy_and_the_place_stays_one() -> None:
    setting = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert COPIES["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert without_copies({**STARTED, **setting}) == {**without_copies(STARTED), **setting}
    assert agent_variables("1", setting).keys().isdisjoint(setting)


def test_an_address_that_the_script_sets_is_used() -> None:
    launch = detect({**STARTED, "MASTER_PORT": "7009"})
    assert (launch.launcher, launch.init_method) == ("dualdist run", "env://")


def test_a_rank_that_the_script_sets_is_still_compared() -> None:
    with pytest.raises(ConfigurationError, match="must be the same from every launcher"):
        detect({**STARTED, "RANK": "0"})


def test_variables_of_the_user_replace_all_copies_of_their_launcher() -> None:
    torch, horovod = torchrun_variables(WORLD, ["a", "a"], ("127.0.0.1", 1)), horovod_variables(WORLD)
    found = copied_variables(torch, horovod, given={"MASTER_PORT": "2"})
    assert "RANK" not in found and found["HOROVOD_RANK"] == "1"


def test_copies_that_are_removed_leave_what_others_have_set() -> None:
    env = {**STARTED}
    added = {"ADDED": "0", "EXTRA": "1"}
    add_copies(added, env)
    assert detect(env) == detect(OWN) and not added.keys() & without_copies(env).keys()
    env["EXTRA"] = "2"
    remove_copies(added, env)
    assert env == {**STARTED, "EXTRA": "2"}
    alone: dict[str, str] = {}
    add_copies(added, alone)
    remove_copies(added, alone)
    assert alone == {}


def test_no_copy_reaches_the_processes_of_another_launcher() -> None:
    assert without_launchers({**STARTED, "KEPT": "1"}) == {"KEPT": "1"}
