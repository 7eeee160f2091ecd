"""Variables of the environment that stop a job, or slow it down: it says which, and what to do."""

from __future__ import annotations

import re

import pytest

from ..helpers.script_launch import Script, launch

SCRIPT = """\
import os, sys, torch, dualdist as hvd

os.environ[sys.argv[1]] = "lo,nope"
try:
    hvd.init()
except hvd.ConfigurationError as error:
    os.write(1, f"<{error}>\\n".encode())
del os.environ[sys.argv[1]]
for chosen, threads in (("1", 1000), (None, 1), (None, 1000)):
    os.environ.pop("OMP_NUM_THREADS")
    if chosen:
        os.environ["OMP_NUM_THREADS"] = chosen
    torch.set_num_threads(threads)
    os.write(2, f"|{chosen} {threads}|\\n".encode())  # as the warning
    hvd.init()
    hvd.shutdown()
    os.environ["OMP_NUM_THREADS"] = "1"
"""


@pytest.mark.only_ci(where=lambda name: name == "torchrun-horovod")
@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("torchrun", "GLOO_SOCKET_IFNAME"),
        ("mpirun-torch", "GLOO_SOCKET_IFNAME"),
        ("torchrun-horovod", "HOROVOD_GLOO_IFACE"),
    ],
)
def test_an_unknown_interface_is_an_error_on_every_rank_and_too_many_threads_are_warned_of_once(
    name: str, variable: str, script: Script
) -> None:
    """Unless the user has set the number of threads."""
    output = launch(name, script(SCRIPT), variable).check()
    errors = re.findall(r"<(.*)>", output)
    assert len(errors) == 2
    for error in errors:
        assert error.startswith(f"`{variable}` must name network interfaces of ")
        assert "but is 'lo,nope' instead" in error and "(lo" in error
    before, _, after = output.partition("|None 1000|")
    assert "OMP_NUM_THREADS" not in before
    (warned,) = re.findall(r"On \S+, 2 processes with 1000 threads each share \d+ CPUs", after)
    assert warned and after.count("Set OMP_NUM_THREADS=") == 1


@pytest.mark.parametrize("chosen", [None, "0"])
def test_open_mpi_leaves_the_core_to_training_while_horovod_waits(script: Script, chosen: str | None) -> None:
    """Unless the user has chosen otherwise. Open MPI stores the choice in the named variable when it starts."""
    path = script(
        "import ctypes, os, dualdist as hvd\n"
        "hvd.init(backend='horovod', transport='mpi')\n"
        "yields = ctypes.c_bool.in_dll(ctypes.CDLL('libmpi.so.40'), 'ompi_mpi_yield_when_idle')\n"
        "os.write(1, f'<{yields.value}>\\n'.encode())\n"
    )
    environment = {} if chosen is None else {"OMPI_MCA_mpi_yield_when_idle": chosen}
    output = launch("mpirun", path, environment=environment).check()
    assert re.findall(r"<(.*)>", output) == [str(chosen is None)] * 2
