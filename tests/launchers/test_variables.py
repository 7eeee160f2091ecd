"""Variables of the environment that stop a job, or slow it down: it says which, and what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..helpers.script_launch import launch


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("torchrun", "GLOO_SOCKET_IFNAME"),
        ("mpirun-torch", "GLOO_SOCKET_IFNAME"),
        ("torchrun-horovod", "HOROVOD_GLOO_IFACE"),
    ],
)
def test_an_unknown_interface_is_an_error_on_every_rank(name: str, variable: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, dualdist\n"
        "try:\n"
        "    dualdist.init()\n"
        "except dualdist.ConfigurationError as error:\n"
        "    os.write(1, f'<{error}>\\n'.encode())\n"
    )
    ended = launch(name, str(script), environment={variable: "lo,nope"})
    errors = re.findall(r"<(.*)>", ended.output)
    assert len(errors) == 2, ended.output
    for error in errors:
        assert error.startswith(f"`{variable}` must name network interfaces of ")
        assert "but is 'lo,nope' instead" in error and "(lo" in error


@pytest.mark.parametrize("name", ["torchrun", "mpirun"])
@pytest.mark.parametrize("threads", [1, 1000])
def test_more_threads_than_cpus_are_warned_of_once(name: str, threads: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch, dualdist as hvd\n"
        "del os.environ['OMP_NUM_THREADS']\n"
        f"torch.set_num_threads({threads})\n"
        "hvd.init()\n"
    )
    ended = launch(name, str(script))
    assert ended.code == 0, ended.output
    warned = re.findall(r"On \S+, 2 processes with 1000 threads each share \d+ CPUs", ended.output)
    assert len(warned) == (threads == 1000), ended.output
    assert ended.output.count("Set OMP_NUM_THREADS=") == len(warned)


def test_a_number_of_threads_that_the_user_has_set_is_not_warned_of(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch, dualdist as hvd\ntorch.set_num_threads(1000)\nhvd.init()\n")
    ended = launch("torchrun", str(script))
    assert (ended.code, ended.output.count("OMP_NUM_THREADS")) == (0, 0), ended.output


@pytest.mark.parametrize("chosen", [None, "0"])
def test_open_mpi_leaves_the_core_to_training_while_horovod_waits(tmp_path: Path, chosen: str | None) -> None:
    """Unless the user has chosen otherwise. Open MPI stores the choice in the named variable when it starts."""
    script = tmp_path / "script.py"
    script.write_text(
        "import ctypes, os, dualdist as hvd\n"
        "hvd.init(backend='horovod', transport='mpi')\n"
        "yields = ctypes.c_bool.in_dll(ctypes.CDLL('libmpi.so.40'), 'ompi_mpi_yield_when_idle')\n"
        "os.write(1, f'<{yields.value}>\\n'.encode())\n"
    )
    environment = {} if chosen is None else {"OMPI_MCA_mpi_yield_when_idle": chosen}
    ended = launch("mpirun", str(script), environment=environment)
    assert ended.code == 0, ended.output
    assert re.findall(r"<(.*)>", ended.output) == [str(chosen is None)] * 2
