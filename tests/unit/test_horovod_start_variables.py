"""The environment variables with which Horovod starts, and which worlds it can start."""

from __future__ import annotations

from typing import Any

import pytest

from dualdist.core.types import Launch, Settings
from dualdist.errors import ConfigurationError

from ..helpers.requirements import need_modules

FUSION = "HOROVOD_FUSION_THRESHOLD"
FOR_MPI = {"OMPI_MCA_mpi_yield_when_idle": "1", "HOROVOD_CYCLE_TIME": "0.25"}


def start_variables(*arguments: Any, **options: Any) -> dict[str, str | None]:
    need_modules("horovod.torch")
    from dualdist.horovod import backend

    return dict(backend.start_variables(*arguments, **options))


def test_over_mpi_horovods_thread_yields_and_runs_more_often() -> None:
    for env in ({}, dict.fromkeys(FOR_MPI, "")):
        assert FOR_MPI.items() <= start_variables(env, "mpi", uses_mpi=True).items()
    assert not FOR_MPI.keys() & start_variables({}, "gloo", uses_mpi=False).keys()


@pytest.mark.parametrize("name", FOR_MPI)
def test_the_users_choice_for_mpi_is_kept(name: str) -> None:
    variables = start_variables({name: "1"}, "mpi", uses_mpi=True)
    assert FOR_MPI.keys() & variables.keys() == FOR_MPI.keys() - {name}


def test_variables_that_dualdist_has_copied_are_unset() -> None:
    variables = start_variables({"HOROVOD_RANK": "1", "DUALDIST_COPIES": "HOROVOD_RANK=1"}, None, uses_mpi=False)
    assert variables["HOROVOD_RANK"] is None


def test_horovod_fuses_no_large_buckets_unless_the_user_sets_how_it_fuses() -> None:
    assert start_variables({}, "gloo", uses_mpi=False)[FUSION] == str(8 * 2**20)
    for name in (FUSION, "HOROVOD_AUTOTUNE"):
        assert FUSION not in start_variables({name: "1"}, "gloo", uses_mpi=False)


def test_a_part_of_the_ranks_is_refused_where_mpi_keeps_horovod_in_its_first_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need_modules("horovod.torch")
    from dualdist.horovod.backend import HorovodBackend

    monkeypatch.setattr(HorovodBackend, "_kept", True)
    with pytest.raises(ConfigurationError, match="`comm` must be all ranks, but is a part"):
        HorovodBackend.start(Launch("mpirun", 0, 1, is_part=True), Settings(), {}, None)
