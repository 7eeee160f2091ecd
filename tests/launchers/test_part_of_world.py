"""`init(comm=)` under mpirun with some of the ranks: each group is a world of its own, on every backend."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import dualdist as hvd
from dualdist.errors import ConfigurationError

from ..helpers.requirements import need_modules
from ..helpers.script_launch import finish
from ..helpers.world import MPIRUN

FORMS = [f"members-{form}" for form in ("split", "list", "all", "reversed")]
FORMS += [f"sets-{form}" for form in ("whole", "reversed", "split", "list")]


@pytest.mark.only_ci
@pytest.mark.only_all(where=lambda forms: forms[0] not in ("members-split", "sets-whole", "sets-split"))
@pytest.mark.parametrize(
    ("backend", "forms"),
    [("torch", FORMS), *(("horovod", [form]) for form in FORMS)],  # Horovod itself joins one world in a process
    ids=lambda value: value if isinstance(value, str) else "-".join(value[:1]),
)
def test_the_members_of_a_communicator_form_a_world_and_communicators_are_process_sets(
    backend: str, forms: list[str]
) -> None:
    need_modules("mpi4py", *(["horovod.torch"] if backend == "horovod" else []))
    command = [*(part.format(size=3) for part in MPIRUN), sys.executable, "-m", "tests.helpers.part_of_world"]
    # A fork ends without MPI_Finalize where the script itself has started MPI.
    ended = finish([*command, backend, *forms], forks=False)
    assert (ended.code, ended.output) == (0, "")


def test_the_error_for_a_transport_in_place_of_a_communicator_names_its_argument() -> None:
    with pytest.raises(ConfigurationError, match=r"`comm` must be .*'nccl' instead.*backend=.*transport="):
        hvd.init("nccl")


def test_ranks_outside_the_list_and_launchers_without_mpi_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=r"`comm` must name this process, rank 1 of 4, but is \[0, 2\]"):
        hvd.init(comm=[0, 2])
    with pytest.raises(ConfigurationError, match=r"`comm` must name all 4 ranks.*mpirun.*process_sets"):
        hvd.init(comm=iter([1, 2]))


def test_process_sets_can_be_any_iterable_or_dynamic_in_any_case() -> None:
    forms: tuple[Any, ...] = (iter(()), (), "Dynamic", [], None)
    for given in forms:
        hvd.init(process_sets=given)
        hvd.shutdown()
