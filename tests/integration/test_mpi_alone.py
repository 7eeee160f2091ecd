"""The backend mpi4py in scripts that use only torch.distributed, started by mpirun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from ..helpers.requirements import need_modules
from ..helpers.script_launch import finish, launch
from ..helpers.world import ROOT

SCRIPT_OF_MANY_WORLDS = """\
import threading
import torch, torch.distributed as dist
import dualdist.mpi.transport

for cycle in range(100):
    dist.init_process_group(["mpi4py", "cpu:mpi4py"][cycle % 2], init_method="mpi4py://")
    pair = dist.new_group([0, 1])
    tensor = torch.full((1,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor, group=pair)
    dist.all_reduce(tensor)
    assert tensor.item() == 6.0
    dist.destroy_process_group()
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
from mpi4py import MPI
handle = MPI.COMM_WORLD.Dup()
assert handle.py2f() < 10, handle.py2f()  # communicators are numbered; freed numbers are used again

dist.init_process_group("mpi4py", init_method="mpi4py://")
import dualdist
dualdist.init()
assert (dualdist.backend_name(), dualdist.transport_name(), dualdist.size()) == ("torch", "mpi", 2)
assert dualdist.allreduce(torch.ones(2), op=dualdist.Sum).tolist() == [2.0, 2.0]
dualdist.shutdown()
assert dist.is_initialized()  # the script ends without destroying it
dist.all_reduce(torch.ones(1))
"""

SCRIPT_WITH_THREAD_LEVEL = """\
import sys, mpi4py
mpi4py.rc.thread_level = sys.argv[1]
import torch, torch.distributed as dist, torch.nn as nn
import dualdist.mpi.transport
from mpi4py import MPI
assert MPI.Query_thread() < MPI.THREAD_MULTIPLE
try:
    dist.init_process_group("mpi4py", init_method="mpi4py://")
except dualdist.BackendUnavailableError as error:
    print(error)
    raise SystemExit(0)
works = [dist.all_reduce(torch.ones(1 << 16), async_op=True) for _ in range(20)]
futures = [work.get_future() for work in works]
for _ in range(50):
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 4
assert all(future.wait()[0][-1] == 2 for future in futures)
dist.destroy_process_group()
"""

SCRIPT_THAT_LEAVES_THE_START_OF_MPI = """\
import mpi4py
mpi4py.rc.initialize = False  # as scripts of Horovod do, which starts MPI itself
from mpi4py import MPI
import dualdist, torch
dualdist.init()
assert dualdist.allreduce(torch.ones(2), op=dualdist.Sum).tolist() == [2.0, 2.0]
assert MPI.COMM_WORLD.Get_size() == 2
assert MPI.COMM_WORLD.allreduce(1) == 2
"""

SCRIPT_WITH_A_CALLBACK_AT_ITS_END = """\
import atexit, os, threading
import torch, torch.distributed as dist
import dualdist.mpi.transport

ending = threading.Event()

def callback(future):
    if threading.current_thread() is not threading.main_thread():  # in which `then` calls it if the future has ended
        ending.wait()
    for _ in range(2000):
        torch.ones(1).add_(1)
    os.write(1, b"ended\\n")

dist.init_process_group("mpi4py", init_method="mpi4py://")
atexit.register(ending.set)
futures = [dist.all_reduce(torch.ones(1 << 16), async_op=True).get_future().then(callback) for _ in range(2)]
dist.destroy_process_group()
"""

SCRIPT_WITH_AN_EXCEPTHOOK = """\
import sys
import dualdist
dualdist.init()
from mpi4py import MPI
sys.excepthook = lambda *_: print("shown by the script", flush=True)  # as rich.traceback.install() does
if MPI.COMM_WORLD.Get_rank() == 0:
    MPI.COMM_WORLD.recv(source=1)
raise RuntimeError
"""


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(request.param)
    return str(path)


@pytest.mark.only_ci
@pytest.mark.parametrize("script", [SCRIPT_OF_MANY_WORLDS], indirect=True, ids=["many worlds"])
def test_rank_and_size_are_those_of_mpi_and_a_hundred_worlds_leak_nothing(script: str) -> None:
    ended = launch("mpirun", script)
    assert (ended.code, ended.output) == (0, "")


@pytest.mark.only_ci
@pytest.mark.parametrize("script", [SCRIPT_WITH_THREAD_LEVEL], indirect=True, ids=["thread level"])
def test_mpi_that_allows_one_call_at_a_time_gets_one_at_a_time(script: str) -> None:
    # In a new interpreter, at whose end mpi4py finalizes MPI.
    ended = launch("mpirun", script, "serialized", forks=False)
    assert (ended.code, ended.output) == (0, "")


@pytest.mark.parametrize("script", [SCRIPT_THAT_LEAVES_THE_START_OF_MPI], indirect=True, ids=["start"])
def test_init_starts_mpi_if_the_import_of_mpi4py_did_not(script: str) -> None:
    settings = {"DUALDIST_BACKEND": "torch", "DUALDIST_TRANSPORT": "mpi"}
    ended = launch("mpirun", script, environment=settings)
    assert (ended.code, ended.output) == (0, "")


@pytest.mark.only_ci
@pytest.mark.parametrize("script", [SCRIPT_WITH_A_CALLBACK_AT_ITS_END], indirect=True, ids=["callback"])
def test_the_interpreter_ends_after_the_callbacks_of_futures(script: str) -> None:
    ended = launch("mpirun", script, forks=False)
    assert (ended.code, ended.output.split()) == (0, ["ended"] * 4)


@pytest.mark.only_ci
@pytest.mark.parametrize("script", [SCRIPT_WITH_AN_EXCEPTHOOK], indirect=True, ids=["excepthook"])
def test_an_exception_that_the_script_shows_itself_ends_the_job(script: str) -> None:
    settings = {"DUALDIST_BACKEND": "torch", "DUALDIST_TRANSPORT": "mpi"}
    # In a new interpreter, at whose end mpi4py would wait for the other rank.
    ended = launch("mpirun", script, environment=settings, forks=False)
    assert ended.code != 0
    assert ended.output.count("shown by the script") == 1


@pytest.mark.parametrize("script", [SCRIPT_WITH_THREAD_LEVEL], indirect=True, ids=["thread level"])
def test_mpi_for_a_single_thread_is_refused(script: str) -> None:
    need_modules("mpi4py")
    ended = finish([sys.executable, script, "single"])
    assert ended.code == 0
    assert "MPI must allow calls from any thread" in ended.output


@pytest.mark.only_ci
def test_torch_finds_the_backend_of_an_installed_package(tmp_path: Path) -> None:
    if not hasattr(dist.Backend, "_ensure_backend_registered"):
        pytest.skip("this torch reads no entry points of backends")
    build = f"from setuptools import build_meta as b; b.prepare_metadata_for_build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    program = (
        "import torch, torch.distributed as dist; dist.init_process_group('mpi4py'); t = torch.ones(1); "
        "dist.all_reduce(t); print(f'{dist.get_backend()} {t.item()}', flush=True); dist.destroy_process_group()"
    )
    command = ("-m", "dualdist", "exec", "--", sys.executable, "-c", program)
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = launch("mpirun-torch", *command, environment=path, forks=False)
    assert (ended.code, ended.output.count("mpi4py 2.0")) == (0, 2), ended.output


def test_a_launcher_of_another_mpi_is_an_error_with_the_fix() -> None:
    need_modules("mpi4py")
    program = (
        "import dualdist.mpi.transport, torch.distributed as dist; "
        "dist.init_process_group('mpi4py', init_method='mpi4py://')"
    )
    ended = finish([sys.executable, "-c", program], {"PMI_RANK": "0", "PMI_SIZE": "2"})
    assert ended.code == 1
    assert "MPI's world has 1 processes while the world size is 2 (from PMI_SIZE)" in ended.output
    assert "which mpiexec did not start. Start with the mpirun of that library" in ended.output
