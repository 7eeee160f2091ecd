"""The environment variables with which Horovod starts."""

from __future__ import annotations

import pytest

from dualdist.backends.horovod.start_variables import start_variables

YIELDS = "OMPI_MCA_mpi_yield_when_idle"


def test_open_mpi_yields_while_it_waits() -> None:
    assert start_variables({}, "mpi")[YIELDS] == "1"


@pytest.mark.parametrize("chosen", ["0", "1"])
def test_the_users_choice_for_open_mpi_is_kept(chosen: str) -> None:
    assert YIELDS not in start_variables({YIELDS: chosen}, "mpi")


def test_variables_that_dualdist_has_copied_are_unset() -> None:
    variables = start_variables({"HOROVOD_RANK": "1", "DUALDIST_COPIES": "HOROVOD_RANK=1"}, None)
    assert variables["HOROVOD_RANK"] is None
