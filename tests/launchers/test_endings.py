"""How a job fails: the first error is reported once, and no process is left. test_compat.py tests success."""

from __future__ import annotations

import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ..helpers.ports import free_ports
from ..helpers.requirements import need_modules
from ..helpers.script_launch import LAUNCHERS, Script, finish, launch

TOGETHER = [name for name, launcher in LAUNCHERS.items() if launcher.size == 2]

SCRIPT = """\
import sys, torch, dualdist as hvd
hvd.init()
assert hvd.size() == 2
hvd.allreduce(torch.ones(4))
if sys.argv[1] == "raise" and hvd.rank() == 1:
    raise RuntimeError("the reason")
if sys.argv[1] == "exit" and hvd.rank() == 1:
    sys.exit(3)
if sys.argv[1] == "return" and hvd.rank() == 1:
    sys.exit()
hvd.allreduce(torch.ones(4))
"""

HELD_ERROR = """\
import atexit, os, pathlib, select, sys, time
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import dualdist as hvd


def raising(*args, **kwargs):
    raise ArithmeticError("on purpose")


def followed(*args, all_reduce=dist.all_reduce, **kwargs):
    work = all_reduce(*args, **kwargs)
    work.get_future().add_done_callback(ended.append)
    return work


class Last:
    def __del__(self, wait=select.select):
        wait([first], [], [])  # rank 0 ends at the latest while the interpreter of this one does
        for _ in range(500):
            if ended:
                break
            wait([], [], [], 0.01)  # C++ has 5 s to abort the process


ended, ending = [], pathlib.Path(sys.argv[1])
hvd.init(backend="torch", transport="gloo")
first = os.pidfd_open(hvd.broadcast_object(os.getpid(), 0))
rank, weight = hvd.rank(), torch.nn.Parameter(torch.zeros(2))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), comm_hook=allreduce_hook)
with mock.patch.object(dist, "all_reduce", followed if rank else raising):
    try:
        weight.sum().backward()
    except (ArithmeticError, hvd.HorovodInternalError) as error:
        held = error
hvd.shutdown()
if rank == 0:
    while not ending.exists():
        time.sleep(0.01)
    os._exit(0)
sys.last = Last()
atexit.register(ending.touch)
"""


REPORTS = {
    "torchrun": r"local_rank: (\d) \(pid",
    "horovodrun": r"Process name: (\d)",
    "mpirun": r"Process name: \[\[\d+,1\],(\d)\]",
}
"""How a launcher names the process that has failed first."""


@pytest.mark.only_ci(where=lambda name: name != "torchrun")
@pytest.mark.parametrize("name", TOGETHER)
def test_an_exception_on_one_rank_ends_all_and_is_reported_once(name: str, script: Script) -> None:
    """The launcher names this rank, and not the other one, which ends because of it. Its interpreter may end sooner."""
    ended = launch(name, script(SCRIPT), "raise", forks=name not in REPORTS)
    assert ended.code != 0
    assert ended.output.count("RuntimeError: the reason") == 1
    assert "without an exception" not in ended.output
    if name in REPORTS:
        assert re.findall(REPORTS[name], ended.output)[:1] == ["1"]


@pytest.mark.only_ci(where=lambda name: name != "torchrun")
@pytest.mark.parametrize("name", TOGETHER)
def test_a_rank_that_ends_early_without_an_exception_is_named(name: str, script: Script) -> None:
    ended = launch(name, script(SCRIPT), "return")
    assert ended.code != 0
    assert "Rank 1 ended or called shutdown(), without an exception and without this call. " in ended.output
    assert "If one had fewer batches than the others" in ended.output


@pytest.mark.only_ci
def test_mpirun_returns_the_exit_code_of_the_rank_that_has_ended_first(script: Script) -> None:
    assert launch("mpirun", script(SCRIPT), "exit", forks=False).code == 3


def test_ranks_that_outlive_the_first_print_no_frames_of_c10d(script: Script) -> None:
    """Rank 0 serves the store. What the other rank does without it must not log c10d's stack again and again."""
    path = script(
        "import os, select, dualdist as hvd\n"
        "hvd.init()\n"
        "first = os.pidfd_open(hvd.broadcast_object(os.getpid(), 0))\n"
        "hvd.barrier()\n"
        "if hvd.rank() == 1:\n"
        "    select.select([first], [], [])\n"
        "    try:\n"
        "        hvd.barrier()\n"
        "    except hvd.HorovodInternalError as error:\n"
        "        print(error)\n"
    )
    output = launch("mpirun-torch", path, environment={"DUALDIST_STALL_WARN_SECONDS": "0.2"}).check()
    # On a busy machine, either rank may be late in a call before.
    lines = [line for line in output.splitlines() if not line.startswith("Stalled for ")]
    assert "rank 0: process ended" in output and len(lines) == 3


CRASH = """\
import ctypes, os, select, sys, threading, torch, dualdist as hvd

hvd.init(backend="horovod", transport="gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
other = os.pidfd_open(hvd.broadcast_object(os.getpid(), 1))
if hvd.rank() == 1:
    os._exit(3)
select.select([other], [], [])
ended = threading.Event()
threading.Thread(target=ctypes.CDLL("libstdc++.so.6")["_ZSt9terminatev"], daemon=True).start()
if sys.argv[3] == "waits":
    ended.wait()
hvd.allreduce(torch.ones(3))
"""


@pytest.mark.only_ci(where=lambda what: what == "waits")
@pytest.mark.parametrize(("what", "code"), [("calls", 1), ("waits", -signal.SIGABRT)])
def test_a_crash_of_horovods_gloo_is_reported_with_its_cause(
    what: str, code: int, script: Script, tmp_path: Path
) -> None:
    """Its thread ends the process with std::terminate when the connection to a rank breaks."""
    need_modules("horovod")
    command = [sys.executable, script(CRASH), str(tmp_path / "store")]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: finish([*command, rank, what]), ("0", "1"))
    assert (first.code, second.code) == (code, 3)
    assert (
        "a crash of Horovod ends this process in 10 s; rank 0: missing ranks: [1].\n  rank 1: process ended"
        in first.output
    )
    assert ("failed: the cause is rank 1." in first.output) == (what == "calls")
    # The standard library's own message, which names the exception if there is one.
    assert ("terminate called without an active exception" in first.output) == (what == "waits")


SCRIPT_WITH_HANDLER = """
import atexit, ctypes
import dualdist as hvd

get_terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13get_terminatev"]
get_terminate.restype = ctypes.c_void_p
former = get_terminate()
atexit.register(lambda: print(f"<at the end {get_terminate() == former}>"))  # runs after those of init()
hvd.init()
print(f"<in the world {get_terminate() == former}>", flush=True)
"""


def test_a_crash_while_the_interpreter_ends_calls_no_python(script: Script) -> None:
    need_modules("horovod")
    output = launch("horovodrun", script(SCRIPT_WITH_HANDLER)).check()
    assert output.count("<in the world False>") == output.count("<at the end True>") > 0


def test_a_world_that_is_not_the_launched_one_is_an_error_on_every_rank(script: Script) -> None:
    need_modules("horovod.torch")
    path = script(
        "import os, horovod.torch\n"
        "horovod.torch.init()  # a world of one under torchrun\n"
        "import dualdist\n"
        "try:\n"
        "    dualdist.init()\n"
        "except dualdist.WorldMismatchError as error:\n"
        "    os.write(1, f'<{error}>\\n'.encode())\n"
    )
    output = launch("torchrun", path).check()
    errors = [line for line in output.splitlines() if line.startswith("<")]
    assert len(errors) == 2
    for line in errors:
        assert "World size must be the 2 (from WORLD_SIZE)" in line
        assert "but is 1 instead in horovod" in line
        assert "Do not start the backend before dualdist.init()" in line


def test_init_method_joins_processes_without_a_launcher(script: Script, tmp_path: Path) -> None:
    path = script(
        "import sys, torch, torch.multiprocessing as mp, dualdist as hvd\n"
        "def work(rank, addresses):\n"
        "    for address in addresses:\n"
        "        hvd.init(init_method=address, rank=rank, world_size=2)\n"
        "        assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == [0, 1]\n"
        "        assert (hvd.local_rank(), hvd.local_size()) == (rank, 2)\n"
        "        hvd.shutdown()\n"
        "if __name__ == '__main__':\n"
        "    mp.start_processes(work, (sys.argv[1:],), nprocs=2, start_method='fork')\n"
    )
    ended = launch("python", path, f"file://{tmp_path}/meeting", f"tcp://127.0.0.1:{free_ports(1)[0]}")
    assert (ended.code, ended.output) == (0, "")


@pytest.mark.only_all
def test_ranks_end_without_a_crash_while_one_keeps_the_error_of_its_hook(script: Script, tmp_path: Path) -> None:
    """The collective of the other rank fails only when that rank ends, since the error keeps its process group.

    The ranks are not forks: a fork skips the end of the interpreter, in which C++ would abort.
    """
    launch("torchrun", script(HELD_ERROR), str(tmp_path / "ending"), forks=False).check()


@pytest.mark.only_ci
@pytest.mark.only_all(where=lambda launcher, ending: (launcher, ending) != ("mpirun", "raise"))
@pytest.mark.parametrize(
    ("launcher", "ending"), [("mpirun", "raise"), ("mpirun", "hvd.shutdown()"), ("mpirun-torch", "raise")]
)
def test_a_job_ends_when_a_rank_has_stopped(launcher: str, ending: str, script: Script) -> None:
    """Horovod's thread, which its shutdown waits for, waits in MPI for the stopped rank."""
    path = script(
        "import os, signal, torch, dualdist as hvd\n"
        "hvd.init()\n"
        "if hvd.rank() == 1:\n"
        "    signal.raise_signal(signal.SIGSTOP)\n"
        "try:\n"
        "    hvd.allreduce(torch.ones(1))\n"
        "except hvd.StallError:\n"
        "    os.write(1, b'stalled\\n')\n"
        f"    {ending}\n"
    )
    ended = launch(launcher, path, environment={"DUALDIST_STALL_TIMEOUT_SECONDS": "2"}, forks=False)
    assert "stalled\n" in ended.output
    assert ended.code != 0
