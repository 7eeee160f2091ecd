"""A rank that is stopped (SIGSTOP) during `init` under mpirun: the others raise or end soon, and name it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import pytest

from ..helpers.at_once import started_at_once
from ..helpers.requirements import need_modules
from ..helpers.script_launch import finish
from ..helpers.world import MPIRUN

SCRIPT = """\
import os, pathlib, pkgutil, signal, sys, torch
import dualdist as hvd
sys.path.insert(0, os.getcwd())
from tests.helpers.files import wait_for

moment, folder = sys.argv[1], pathlib.Path(sys.argv[2])
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
(folder / f"begun{rank}").touch()
wait_for(folder / f"begun{other}" for other in range(3))  # until all have imported torch

def stop(*arguments, **options):
    signal.raise_signal(signal.SIGSTOP)  # to this thread: `os.kill` may return before the process stops
    os._exit(1)

if rank == 1 and moment == "before":
    stop()
elif rank == 1:
    module, name = moment.rsplit(".", 1)
    owner = pkgutil.resolve_name(module)
    assert hasattr(owner, name)
    setattr(owner, name, stop)
try:
    hvd.init()
except Exception as error:
    if rank != 1:  # mpirun continues the stopped rank before it ends it
        os.write(1, f"<{rank}: {type(error).__name__}: {error}>\\n".encode())
(folder / str(rank)).touch()
wait_for(folder / other for other in "02")  # mpirun ends all when one has ended
sys.exit(1)
"""
"""Three ranks, of which rank 1 stops before `init`, or where it calls a function."""

SECONDS = 10
"""Longer than a busy machine needs for a start."""
COMMAND = [part.format(size=3) for part in MPIRUN]
ENVIRONMENT = {"DUALDIST_START_TIMEOUT_SECONDS": str(SECONDS), "DUALDIST_STALL_TIMEOUT_SECONDS": "300"}
BACKENDS = {
    "torch-mpi": {"DUALDIST_BACKEND": "torch", "DUALDIST_TRANSPORT": "mpi"},
    "torch-gloo": {"DUALDIST_BACKEND": "torch", "DUALDIST_TRANSPORT": "gloo"},
    "horovod-mpi": {"DUALDIST_BACKEND": "horovod"},
}


BEFORE = [(backend, "before") for backend in BACKENDS]
DURING = [
    ("torch-mpi", "dualdist.mpi.meeting.MpiBoard.read"),
    ("torch-mpi", "dualdist.mpi.transport.mpi.unfinished"),
    ("torch-mpi", "dualdist.core.lifecycle.own_node"),
    ("torch-gloo", "dualdist.core.lifecycle.own_node"),
    ("horovod-mpi", "dualdist.horovod.group.hvd.init"),
    ("horovod-mpi", "dualdist.core.lifecycle.own_node"),
]
Outputs = Mapping[tuple[str, str], Future[str]]


@pytest.fixture(scope="module")
def outputs(request: pytest.FixtureRequest) -> Iterator[Outputs]:
    def output_of(case: tuple[str, str], folder: Path) -> str:
        backend, moment = case
        need_modules("mpi4py", *["horovod"] * backend.startswith("horovod"))
        command = [*COMMAND, sys.executable, "-c", SCRIPT, moment, str(folder)]
        ended = finish(command, {**ENVIRONMENT, **BACKENDS[backend]})
        assert ended.code != 0, ended.output
        return ended.output

    with started_at_once(request, "case", output_of, 3) as futures:
        yield futures


@pytest.mark.only_ci
@pytest.mark.only_all(where=lambda case: case[0] == "torch-gloo")
@pytest.mark.parametrize("case", BEFORE, ids="-".join)
def test_ranks_name_one_that_is_stopped_before_init(case: tuple[str, str], outputs: Outputs) -> None:
    """MPI_Init cannot be given up: the first rank that waits too long ends, and mpirun ends the others."""
    output = outputs[case].result()
    assert re.search(r"Rank [02] waited 10 s for rank 1, which did not arrive", output), output


@pytest.mark.only_ci
@pytest.mark.only_all(where=lambda case: case != DURING[-1])
@pytest.mark.parametrize("case", DURING, ids="-".join)
def test_ranks_name_one_that_is_stopped_during_init(case: tuple[str, str], outputs: Outputs) -> None:
    output = outputs[case].result()
    found = dict(re.findall(r"<(\d): (.*)>", output))
    assert found.keys() == {"0", "2"}, output
    for text in found.values():
        assert re.search(r"\brank 1\b", text), output
        assert not re.search(r"ranks \d|(for|of) rank [02]|: rank [02]", text), output
