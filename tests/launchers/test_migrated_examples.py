"""examples/migrate: one script with Horovod, with mpi4py, with torch's DDP, and with dualdist has the same losses."""

from __future__ import annotations

import functools
import re

import pytest

from ..helpers.script_launch import launch

FOLDER = "examples/migrate"


def losses(launcher: str, script: str, *, forks: bool = True) -> list[str]:
    output = launch(launcher, f"{FOLDER}/{script}.py", forks=forks).check()
    return re.findall(r"epoch (\d: loss \S+ on 2 processes)", output)


@functools.cache
def losses_after() -> list[str]:
    """The losses with dualdist, of which three epochs are printed once, by rank 0."""
    after = losses("torchrun", "with_dualdist")
    assert [line[0] for line in after] == ["0", "1", "2"]
    return after


@pytest.mark.only_ci(where=lambda script: script != "with_ddp")
@pytest.mark.parametrize(
    ("script", "launcher"), [("with_horovod", "horovodrun"), ("with_mpi4py", "mpirun"), ("with_ddp", "torchrun")]
)
def test_the_script_before_has_the_losses_of_the_script_after(script: str, launcher: str) -> None:
    # mpirun reports a failure if a process does not end the MPI of mpi4py, as a fork of one that has imported torch.
    assert losses(launcher, script, forks=launcher != "mpirun") == losses_after()
