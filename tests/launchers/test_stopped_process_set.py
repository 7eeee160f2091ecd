"""A rank that stops in `add_process_set`, before or after the ranks have agreed.

Horovod itself waits for it without an end, MPI until it ends, too.
"""

from __future__ import annotations

import pytest

from ..helpers.script_launch import Script, launch

SCRIPT = """\
import os, pathlib, signal, time, dualdist as hvd
from dualdist.core.world import current

hvd.init()
other = hvd.allgather_object(os.getpid())[1]
backend, new_groups = current().backend, current().backend.new_groups

def wait_for_stopped(*arguments):
    while pathlib.Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()[0] != "T": time.sleep(0.01)
    backend._timeout = 1.0  # only now: nobody else can be late
    return new_groups(*arguments)

backend.new_groups = (lambda *_: signal.raise_signal(signal.SIGSTOP)) if hvd.rank() == 1 else wait_for_stopped
try:
    hvd.add_process_set([0])
except hvd.StallError as error:
    os.write(1, f"{error}\\n".encode())
os.kill(other, signal.SIGKILL)
os._exit(1)
"""


@pytest.mark.only_ci
@pytest.mark.parametrize("launcher", ["torchrun-horovod", pytest.param("mpirun", marks=pytest.mark.only_all)])
def test_the_others_raise_an_error_that_names_it(launcher: str, script: Script) -> None:
    ended = launch(launcher, script(SCRIPT))
    assert "stalled; missing ranks: [1].\n" in ended.output
    assert "rank 1: no answer: it is stopped\n" in ended.output


CAUGHT = """\
import os, signal, subprocess, sys, dualdist as hvd

KILL = "import os, select, sys; select.select([os.pidfd_open(int(sys.argv[1]))], [], []); os.kill(int(sys.argv[2]), 9)"
hvd.init()
processes = list(map(str, hvd.allgather_object(os.getpid())))
hvd.shutdown()
hvd.init(timeout=3)  # a rank may be late until now
if hvd.rank() == 1:
    signal.raise_signal(signal.SIGSTOP)
try:
    hvd.add_process_set([0])
except hvd.StallError as error:
    os.write(1, f"{error}\\n".encode())
subprocess.Popen([sys.executable, "-IS", "-c", KILL, *processes])
"""
MPI = {"DUALDIST_BACKEND": "torch", "DUALDIST_TRANSPORT": "mpi"}


@pytest.mark.only_ci
@pytest.mark.only_all(where=lambda launcher: launcher == "mpirun")
@pytest.mark.parametrize(
    ("launcher", "environment"),
    [("torchrun", {}), ("torchrun-horovod", {}), ("mpirun", {}), ("mpirun", MPI)],
    ids=["torchrun", "torchrun-horovod", "mpirun", "mpirun-torch-mpi"],
)
def test_a_process_ends_although_the_stopped_one_does_not(
    launcher: str, environment: dict[str, str], script: Script
) -> None:
    limits = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "1000"}
    ended = launch(launcher, script(CAUGHT), environment=limits | environment)
    assert "stalled; missing ranks: [1].\n" in ended.output
