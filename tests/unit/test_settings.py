"""Settings from environment variables, and the errors for wrong values."""

from __future__ import annotations

import pytest

from dualdist.core.launch import is_on, read_settings
from dualdist.core.types import NEVER_SECONDS, Settings
from dualdist.errors import ConfigurationError


def test_an_empty_environment_gives_the_defaults() -> None:
    assert read_settings({}) == Settings()
    assert (*seconds({}), Settings().start_timeout_seconds) == (60, 600, 60)


def test_seconds_are_numbers() -> None:
    assert seconds({"DUALDIST_STALL_WARN_SECONDS": ".5", "DUALDIST_STALL_TIMEOUT_SECONDS": "7"}) == (0.5, 7)
    assert read_settings({"DUALDIST_START_TIMEOUT_SECONDS": "9"}).start_timeout_seconds == 9


@pytest.mark.parametrize(
    "name", ["DUALDIST_STALL_WARN_SECONDS", "DUALDIST_STALL_TIMEOUT_SECONDS", "DUALDIST_START_TIMEOUT_SECONDS"]
)
@pytest.mark.parametrize("value", ["soon", "0", "-1", "", "nan"])
def test_what_is_not_a_positive_number_of_seconds_is_an_error(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=name) as caught:
        read_settings({name: value})
    assert repr(value) in str(caught.value) and "\n" not in str(caught.value)


def seconds(env: dict[str, str]) -> tuple[float, float]:
    read = read_settings(env)
    return read.stall_warn_seconds, read.stall_timeout_seconds


def test_horovods_stall_variables_are_the_defaults() -> None:
    warn, timeout = "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
    assert seconds({warn: "5", timeout: "9"}) == (5, 9)
    assert seconds({warn: "5"}) == (5, 600)
    assert seconds({timeout: "9"}) == (60, 9)
    assert seconds({warn: "0", timeout: "0"}) == seconds({warn: "", timeout: ""}) == (60, 600)
    assert seconds({warn: "5", timeout: "9", "DUALDIST_STALL_WARN_SECONDS": "1"}) == (1, 9)
    assert seconds({warn: "5", timeout: "9", "DUALDIST_STALL_TIMEOUT_SECONDS": "1"}) == (5, 1)


def test_horovods_switch_turns_stalls_off() -> None:
    off = {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_CHECK_TIME_SECONDS": "5"}
    assert seconds(off) == (NEVER_SECONDS, NEVER_SECONDS)
    assert seconds(off | {"DUALDIST_STALL_TIMEOUT_SECONDS": "7"}) == (NEVER_SECONDS, 7)
    for value in ("0", ""):
        assert seconds(off | {"HOROVOD_STALL_CHECK_DISABLE": value}) == (5, 600)


@pytest.mark.parametrize("name", ["HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"])
@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf"])
def test_horovods_seconds_must_be_numbers(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=name) as caught:
        read_settings({name: value})
    assert repr(value) in str(caught.value)


def test_a_switch_is_on_unless_it_is_0() -> None:
    values: list[dict[str, str]] = [{"X": "1"}, {"X": "yes"}, {"X": "0"}, {"X": ""}, {}]
    assert [is_on(env, "X") for env in values] == [True, True, False, False, False]
    assert [is_on(env, "X", True) for env in values] == [True, True, False, True, True]
